//! Gloo as a dylib of itself against the one suite, with ranks as threads and as processes; the backend in C likewise; and
//! the bytes that come out of gloo linked in, gloo through the registry and gloo as a dylib, which must be the same.
//!
//! Rows: `threads::`, `processes::` (gloo as a dylib), `cstore::` (the backend in C, threads), `same::` (the bytes).

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use backend_gloo::GlooFactory;
use conformance::{Harness, Limit, MakeOn, Mode, Plan, Threads, cases};
use ftcore::registry::{Backend, BackendFactory, OnConflict};
use ftcore::{
    Collective, Configuration, DType, Device, Epoch, Error, GroupOptions, InMemoryStore, OpKind,
    ProcessGroup, ProcessGroupExt, ReduceOp, Registry, Result, Store, SubmitOptions, Tensor, deadline_in,
};
use libtest_mimic::{Arguments, Completion, Trial};

#[path = "plugins/build.rs"]
#[allow(
    dead_code,
    reason = "shared with the other test binary, which needs more of it"
)]
mod build;

#[path = "plugins/header.rs"]
#[allow(
    dead_code,
    reason = "shared with the other test binary, which needs more of it"
)]
mod header;

/// Where a process rank finds the library: its parent has built and tried it.
const LIBRARY: &str = "OXCCL_TEST_GLOO_PLUGIN";

fn dylib() -> Result<&'static Backend> {
    static BACKEND: OnceLock<Result<Backend>> = OnceLock::new();
    let loaded = BACKEND.get_or_init(|| {
        let loaded = match std::env::var_os(LIBRARY) {
            Some(path) => oxccl_plugin::open_trusted(&PathBuf::from(path))?,
            None => oxccl_plugin::load(&conformance::dylib("gloo-plugin").map_err(Error::invalid)?)?,
        };
        let backend = loaded.backends().into_iter().find(|b| b.name == "gloo");
        backend.ok_or_else(|| Error::invalid("the plugin has no gloo"))
    });
    loaded.as_ref().map_err(Clone::clone)
}

fn make(options: GroupOptions) -> Result<Box<dyn ProcessGroup>> {
    dylib()?.factory.create(&Device::CPU, &options)
}

/// Asks this program to say why the plugin makes no group.
const REFUSED: &str = "OXCCL_TEST_REFUSED";

fn refusal(options: GroupOptions) -> String {
    let group = dylib().and_then(|backend| backend.create(&Device::CPU, &options));
    group
        .err()
        .map_or("a group was made".to_string(), |e| e.to_string())
}

/// The gloo on the other side refuses values that it cannot use, so that it must have seen them: a typed option and a hint.
fn options_cross() -> std::result::Result<(), String> {
    let library = conformance::dylib("gloo-plugin")?;
    let cases = [
        ("netName", "OXCCL_GLOO_NET_NAME", "eth77", "'eth77'"),
        (
            "Transport",
            "OXCCL_GLOO_TRANSPORT",
            "pigeons",
            "option transport is 'pigeons'",
        ),
        ("minCtas", "OXCCL_GLOO_MIN_CTAS", "4", "does not honour min_ctas"),
    ];
    for (name, variable, value, says) in cases {
        let mut options = GroupOptions::default();
        options.hints.insert(name.into(), value.into());
        let told = refusal(options);
        if !told.contains(says) {
            return Err(format!("{name}={value}: {told}"));
        }
        let this = std::env::current_exe().map_err(|e| e.to_string())?;
        let output = std::process::Command::new(this)
            .envs([(REFUSED, "1"), (variable, value)])
            .env(LIBRARY, &library)
            .output()
            .map_err(|e| e.to_string())?;
        let told = String::from_utf8_lossy(&output.stdout);
        if !told.contains(says) {
            return Err(format!("{variable}={value}: {told}"));
        }
    }
    Ok(())
}

/// The backend in C, with ranks as threads.
fn cstore() -> std::result::Result<Vec<Trial>, String> {
    let source = build::root().join("fixtures/c/cstore.c");
    let library = build::c_plugin("cstore-conformance", &source, &header::folder(), &[])?;
    let loaded = oxccl_plugin::load(&library).map_err(|e| e.to_string())?;
    let backend = loaded.backends().into_iter().next().ok_or("no backend")?;
    let make: MakeOn = Arc::new(move |device, options| backend.factory.create(device, &options));
    let threads = Arc::new(Threads::new(Device::CPU, make).map_err(|e| e.to_string())?);
    let trials = cases().into_iter().map(|case| {
        let threads = threads.clone();
        Trial::ignorable_test(format!("cstore::{}", case.name), move || {
            if let Some(reason) = case.unmet(threads.capabilities(), threads.real_processes()) {
                return Ok(Completion::ignored_with(reason));
            }
            threads.run(&case)?;
            Ok(Completion::Completed)
        })
    });
    Ok(trials.collect())
}

fn main() -> ExitCode {
    if std::env::var_os("OXCCL_CONFORMANCE_CASE").is_some() {
        // A rank of the processes' harness: `run` does its part and nothing else.
        return conformance::run(&[], make);
    }
    if std::env::var_os(REFUSED).is_some() {
        println!("{}", refusal(GroupOptions::default()));
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    trials.push(Trial::test(
        "l42_texts_and_variables_cross_as_the_options_that_they_mean",
        || options_cross().map_err(Into::into),
    ));
    match gloo() {
        Ok(found) => trials.extend(found),
        Err(why) => {
            eprintln!("gloo as a dylib: {why}");
            return ExitCode::FAILURE;
        }
    }
    match (build::cc(), cstore()) {
        (Ok(_), Ok(found)) => trials.extend(found),
        (Ok(_), Err(why)) => {
            eprintln!("the backend in C: {why}");
            return ExitCode::FAILURE;
        }
        (Err(why), _) => trials.push(Trial::ignorable_test("cstore::suite", move || {
            Ok(Completion::ignored_with(why.clone()))
        })),
    }
    for world in 1..=4 {
        trials.push(Trial::test(
            format!("same::direct_registered_and_dylib_give_the_same_bytes::world{world}"),
            move || same(world).map_err(Into::into),
        ));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Builds gloo as a dylib, tries it, and tells the ranks where it is.
fn gloo() -> std::result::Result<Vec<Trial>, String> {
    let path = conformance::dylib("gloo-plugin")?;
    oxccl_plugin::load(&path).map_err(|e| e.to_string())?;
    // SAFETY: the only thread so far; the ranks inherit it.
    unsafe { std::env::set_var(LIBRARY, &path) };
    let make = Arc::new(|_: &Device, options| make(options));
    let plan = Plan {
        limit: Limit::of_a_wrapper(),
        lasting: true,
        ..Plan::new(Device::CPU, &[Mode::Threads, Mode::Processes], make)
    };
    plan.trials().map_err(|e| e.to_string())
}

/// Numbers without a pattern, with every kind of special value now and then.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        // xorshift64*: any fixed sequence does.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn tensor(&mut self, dtype: DType, count: usize) -> Tensor {
        let mut tensor = Tensor::zeros(dtype, count);
        for byte in tensor.bytes_mut() {
            *byte = self.next() as u8;
        }
        tensor
    }
}

/// What one rank gets out of a fixed program of operations.
fn program(group: &dyn ProcessGroup, rank: u32, world: u32) -> Result<Vec<Vec<u8>>> {
    let capabilities = group.capabilities().clone();
    let mut numbers = Numbers(0x9E37_79B9 + u64::from(rank));
    let mut out = Vec::new();
    let mut keep = |op: Collective| -> Result<()> {
        let kind = op.kind();
        let done = group
            .run(op, SubmitOptions::default())
            .map_err(Error::from)?
            .take()?;
        out.push(kind.name().as_bytes().to_vec());
        out.push(vec![done.contributors as u8]);
        out.extend(done.tensors.iter().map(|t| t.bytes().to_vec()));
        Ok(())
    };
    let ops = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Product,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Bxor,
        ReduceOp::PremulSum(0.3),
    ];
    for dtype in DType::ALL {
        for op in ops {
            for count in [1, 17, 4099, 70_001] {
                if capabilities.reduces(op, dtype)
                    && (count < 10_000 || dtype == DType::F32 || dtype == DType::BF16)
                {
                    keep(Collective::AllReduce {
                        tensors: vec![numbers.tensor(dtype, count)],
                        op,
                    })?;
                }
            }
        }
    }
    let n = world as usize;
    keep(Collective::ReduceScatterInto {
        pairs: vec![(
            numbers.tensor(DType::F32, 1001 * n),
            numbers.tensor(DType::F32, 1001),
        )],
        op: ReduceOp::Avg,
    })?;
    keep(Collective::AllToAll {
        inputs: (0..world)
            .map(|to| numbers.tensor(DType::F16, (rank + to) as usize + 1))
            .collect(),
        outputs: (0..world)
            .map(|from| numbers.tensor(DType::F16, (rank + from) as usize + 1))
            .collect(),
    })?;
    keep(Collective::AllGather {
        input: numbers.tensor(DType::I64, rank as usize + 3),
        outputs: (0..n).map(|r| numbers.tensor(DType::I64, r + 3)).collect(),
    })?;
    keep(Collective::Broadcast {
        tensors: vec![numbers.tensor(DType::U8, 999), numbers.tensor(DType::U8, 1)],
        root: world - 1,
    })?;
    if world > 1 {
        keep(Collective::Batch {
            ops: vec![
                Collective::Send {
                    tensor: numbers.tensor(DType::F64, 33),
                    peer: (rank + 1) % world,
                    tag: 5,
                },
                Collective::Recv {
                    tensor: numbers.tensor(DType::F64, 33),
                    peer: Some((rank + world - 1) % world),
                    tag: 5,
                },
            ],
        })?;
    }
    if !capabilities.ops.contains(OpKind::AllToAllInto) {
        return Err(Error::invalid("gloo offers everything"));
    }
    Ok(out)
}

/// The program's results of every rank, as threads over one store.
fn results(factory: &dyn BackendFactory, world: u32) -> Result<Vec<Vec<Vec<u8>>>> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let store = store.clone();
                scope.spawn(move || {
                    let group = factory.create(&Device::CPU, &GroupOptions::default())?;
                    group.configure(Configuration {
                        store,
                        prefix: "same".into(),
                        name: "same".into(),
                        epoch: Epoch(1),
                        rank,
                        world_size: world,
                        deadline: deadline_in(Duration::from_secs(60)),
                        cancel: Default::default(),
                    })?;
                    let out = program(&*group, rank, world);
                    group.shutdown(deadline_in(Duration::from_secs(60)))?;
                    out
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|r| {
                r.join()
                    .unwrap_or_else(|_| Err(Error::invalid("a rank panicked")))
            })
            .collect()
    })
}

fn same(world: u32) -> std::result::Result<(), String> {
    let direct = results(&GlooFactory, world).map_err(|e| format!("direct: {e}"))?;
    let built_in = Registry::global().get("gloo", None).map_err(|e| e.to_string())?;
    let registered = results(&*built_in.factory, world).map_err(|e| format!("registered: {e}"))?;
    let own = Registry::new();
    let dylib = dylib().map_err(|e| e.to_string())?;
    own.register(built_in, OnConflict::Keep)
        .map_err(|e| e.to_string())?;
    own.register(dylib.clone(), OnConflict::Keep)
        .map_err(|e| e.to_string())?;
    let won = own.get("gloo", None).map_err(|e| e.to_string())?;
    if won.source != dylib.source {
        return Err(format!(
            "the plugin does not win over what is linked in: {}",
            won.source
        ));
    }
    let dylib = results(&*won.factory, world).map_err(|e| format!("dylib: {e}"))?;
    let parts: usize = direct.iter().map(Vec::len).sum();
    if parts < 100 || direct != registered || direct != dylib {
        return Err(format!(
            "{parts} parts; registered {}, dylib {}",
            direct == registered,
            direct == dylib
        ));
    }
    Ok(())
}

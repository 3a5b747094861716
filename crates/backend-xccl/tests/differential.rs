//! What oneCCL itself gets wrong (L17), found out against a scalar oracle: every reducing call × operation × dtype × sizes up
//! to 16, with ordinary and with special values, at 2 and 3 ranks. The list must be the one that `route` works around.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a rank that panics is a failed rank, and says where"
)]

use std::collections::BTreeSet;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use backend_xccl::plain::{Plain, RedOp, is_native};
use backend_xccl::{XcclFactory, XcclXpuFactory};
use ftcore::registry::BackendFactory;
use ftcore::{
    Configuration, DType, Device, DeviceKind, Epoch, Store, TcpStore, TcpStoreServer, Tensor, deadline_in,
};
use half::{bf16, f16};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

const RANK: &str = "OXCCL_DIFFERENTIAL_RANK";
const WORLD: &str = "OXCCL_DIFFERENTIAL_WORLD";
const STORE: &str = "OXCCL_DIFFERENTIAL_STORE";

/// Host memory; where the environment chooses xpu devices, those.
fn device() -> Device {
    match std::env::var_os("OXCCL_XPU_DEVICES") {
        Some(_) => Device::new(DeviceKind::Xpu, 0),
        None => Device::CPU,
    }
}

/// What no rank takes on any machine.
const LIMIT: Duration = Duration::from_secs(180);
const OPS: [(&str, RedOp); 4] = [
    ("sum", RedOp::SUM),
    ("product", RedOp::PROD),
    ("max", RedOp::MAX),
    ("min", RedOp::MIN),
];
const CALLS: [&str; 3] = ["all_reduce", "reduce", "reduce_scatter"];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Value {
    Float(f64),
    Integer(i128),
}

fn rounded(dtype: DType, v: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(v as f32),
        DType::F16 => f16::from_f64(v).to_f64(),
        DType::BF16 => bf16::from_f64(v).to_f64(),
        _ => v,
    }
}

fn wrapped(dtype: DType, v: i128) -> i128 {
    match dtype {
        DType::I64 => i128::from(v as i64),
        DType::I32 => i128::from(v as i32),
        DType::I8 => i128::from(v as i8),
        DType::U64 => i128::from(v as u64),
        DType::U32 => i128::from(v as u32),
        _ => i128::from(v as u8),
    }
}

/// Small integers, exact in every type; or NaN, infinities and values that overflow.
fn input(dtype: DType, special: bool, rank: u32, index: usize) -> Value {
    let seed = i64::from(rank) * 31 + index as i64 * 7;
    match (dtype.is_float(), special) {
        (true, false) => Value::Float((seed % 5 - 2) as f64),
        (true, true) => Value::Float(match (index + rank as usize) % 5 {
            0 => f64::NAN,
            1 => f64::INFINITY,
            2 => f64::NEG_INFINITY,
            n => n as f64,
        }),
        (false, false) => Value::Integer(wrapped(dtype, i128::from(seed % 5 - 2))),
        (false, true) => Value::Integer(wrapped(dtype, i128::from(seed + 3) * 0x5DEE_CE66_D1CE_4E5B)),
    }
}

fn expected(dtype: DType, op: &str, values: &[Value]) -> Value {
    let fold = |a: Value, b: Value| match (a, b) {
        (Value::Float(a), Value::Float(b)) => Value::Float(match op {
            "sum" => rounded(dtype, a + b),
            "product" => rounded(dtype, a * b),
            _ if a.is_nan() || b.is_nan() => f64::NAN,
            "max" => a.max(b),
            _ => a.min(b),
        }),
        (Value::Integer(a), Value::Integer(b)) => Value::Integer(match op {
            "sum" => wrapped(dtype, a + b),
            "product" => wrapped(dtype, a.wrapping_mul(b)),
            "max" => a.max(b),
            _ => a.min(b),
        }),
        (a, _) => a,
    };
    values.iter().copied().reduce(fold).unwrap_or(Value::Integer(0))
}

fn store(dtype: DType, value: Value, slot: &mut [u8]) {
    let bytes = match (dtype, value) {
        (DType::F64, Value::Float(v)) => v.to_ne_bytes().to_vec(),
        (DType::F32, Value::Float(v)) => (v as f32).to_ne_bytes().to_vec(),
        (DType::F16, Value::Float(v)) => f16::from_f64(v).to_ne_bytes().to_vec(),
        (_, Value::Float(v)) => bf16::from_f64(v).to_ne_bytes().to_vec(),
        (_, Value::Integer(v)) => v.to_le_bytes()[..slot.len()].to_vec(),
    };
    slot.copy_from_slice(&bytes);
}

fn load(dtype: DType, slot: &[u8]) -> Value {
    let float = |v: f64| Value::Float(v);
    match dtype {
        DType::F64 => float(f64::from_ne_bytes(slot.try_into().unwrap())),
        DType::F32 => float(f32::from_ne_bytes(slot.try_into().unwrap()).into()),
        DType::F16 => float(f16::from_ne_bytes(slot.try_into().unwrap()).to_f64()),
        DType::BF16 => float(bf16::from_ne_bytes(slot.try_into().unwrap()).to_f64()),
        _ => {
            let mut wide = [0u8; 16];
            wide[..slot.len()].copy_from_slice(slot);
            Value::Integer(wrapped(dtype, i128::from_le_bytes(wide)))
        }
    }
}

fn same(a: Value, b: Value) -> bool {
    match (a, b) {
        (Value::Float(a), Value::Float(b)) => a == b || (a.is_nan() && b.is_nan()),
        (a, b) => a == b,
    }
}

/// One rank: the names of all cases in which the library was wrong here.
fn rank(rank: u32, world: u32, address: &str) -> ftcore::Result<BTreeSet<String>> {
    let soon = || deadline_in(Duration::from_secs(60));
    let store_of_all: Arc<dyn Store> = Arc::new(TcpStore::connect(address, soon())?);
    let configuration = Configuration {
        store: store_of_all.clone(),
        prefix: "differential".into(),
        name: "differential".into(),
        epoch: Epoch(1),
        rank,
        world_size: world,
        deadline: soon(),
        cancel: Default::default(),
    };
    let plain = Plain::join_on(&configuration, &device())?;
    let mut wrong = BTreeSet::new();
    for dtype in DType::ALL.into_iter().filter(|d| is_native(*d)) {
        for (name, op) in OPS {
            for special in [false, true] {
                for size in 1..=16usize {
                    for call in CALLS {
                        let scattered = call == "reduce_scatter";
                        let count = if scattered { size * world as usize } else { size };
                        let mut data = Tensor::zeros(dtype, count);
                        for (i, slot) in data.bytes_mut().chunks_exact_mut(dtype.size()).enumerate() {
                            store(dtype, input(dtype, special, rank, i), slot);
                        }
                        let mut out = Tensor::zeros(dtype, size);
                        match call {
                            "all_reduce" => {
                                plain.all_reduce(data.bytes_mut(), dtype, op)?;
                                out.bytes_mut().copy_from_slice(data.bytes());
                            }
                            "reduce" => plain.reduce(data.bytes(), out.bytes_mut(), dtype, op, world - 1)?,
                            _ => plain.reduce_scatter(data.bytes(), out.bytes_mut(), dtype, op)?,
                        }
                        if call == "reduce" && rank != world - 1 {
                            continue;
                        }
                        let first = if scattered { rank as usize * size } else { 0 };
                        for (i, slot) in out.bytes().chunks_exact(dtype.size()).enumerate() {
                            let values: Vec<Value> =
                                (0..world).map(|r| input(dtype, special, r, first + i)).collect();
                            if !same(load(dtype, slot), expected(dtype, name, &values)) {
                                let kind = if special { "special" } else { "ordinary" };
                                wrong.insert(format!("{call} {name} {dtype} of {kind} values"));
                            }
                        }
                    }
                }
            }
        }
    }
    // No rank leaves while another one still needs what is on its way.
    store_of_all.barrier("done", world, soon())?;
    Ok(wrong)
}

/// Starts the ranks and gathers what they found.
fn campaign(world: u32) -> Result<BTreeSet<String>, Failed> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let program = std::env::current_exe()?;
    let children: Vec<_> = (0..world)
        .map(|rank| {
            Command::new(&program)
                .env(RANK, rank.to_string())
                .env(WORLD, world.to_string())
                .env(STORE, format!("127.0.0.1:{}", server.port()))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
        })
        .collect::<Result<_, _>>()?;
    let (mut wrong, mut failed) = (BTreeSet::new(), Vec::new());
    // All of them: why one ended is told by another, and none is left behind.
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            failed.push(format!("rank {rank}: {}: {said}", output.status));
            continue;
        }
        // oneCCL's own log does not come this way: nothing else may be in it.
        let said = String::from_utf8(output.stdout)?;
        if let Some(noise) = said.lines().find(|l| !l.starts_with("wrong: ")) {
            return Err(format!("oneCCL wrote to standard output: {noise}").into());
        }
        wrong.extend(said.lines().map(|l| l.trim_start_matches("wrong: ").to_string()));
    }
    if !failed.is_empty() {
        return Err(failed.join("\n").into());
    }
    Ok(wrong)
}

fn main() -> ExitCode {
    if let (Ok(own), Ok(world), Ok(address)) =
        (std::env::var(RANK), std::env::var(WORLD), std::env::var(STORE))
    {
        std::thread::spawn(|| {
            // The library itself waits for a rank that has failed for ever.
            std::thread::sleep(LIMIT);
            eprintln!("it does not end within {} s", LIMIT.as_secs());
            std::process::exit(1);
        });
        return match rank(own.parse().unwrap(), world.parse().unwrap(), &address) {
            Ok(wrong) => {
                wrong.iter().for_each(|case| println!("wrong: {case}"));
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        };
    }
    let usable = match device().is_cpu() {
        true => XcclFactory.probe(),
        false => XcclXpuFactory.probe(),
    };
    let reason = usable.err().map(|e| e.to_string());
    let trials = [2, 3]
        .into_iter()
        .map(|world| {
            let reason = reason.clone();
            Trial::ignorable_test(
                format!("l17_oneccl_against_the_oracle::world{world}"),
                move || {
                    if let Some(reason) = reason {
                        return Ok(Completion::ignored_with(reason));
                    }
                    let wrong = campaign(world)?;
                    // Everything else is right; these are what `route` composes instead.
                    let worked_around = |case: &str| {
                        let float = [" f64 ", " f32 ", " f16 ", " bf16 "]
                            .iter()
                            .any(|d| case.contains(d));
                        float
                            && case.ends_with("special values")
                            && (case.contains(" max ") || case.contains(" min "))
                    };
                    for case in &wrong {
                        println!("oneCCL is wrong: {case}");
                    }
                    match wrong.iter().find(|case| !worked_around(case)) {
                        Some(case) => {
                            Err(format!("oneCCL is wrong and nothing works around it: {case}").into())
                        }
                        None => Ok(Completion::Completed),
                    }
                },
            )
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

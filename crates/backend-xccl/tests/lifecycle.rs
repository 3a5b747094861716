//! What happens where oneCCL itself offers nothing: deadlines, deaths, two ranks in one process, options, the environment, the
//! end of a process with a thread stuck in the library. On the real oneCCL; ranks are this binary started again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a rank that panics is a failed rank, and says where"
)]

#[path = "lifecycle/raw.rs"]
mod raw;

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_xccl::{XcclFactory, XcclGroup};
use ftcore::peers::{self, Door, Terms};
use ftcore::registry::BackendFactory;
use ftcore::{
    Collective, Configuration, DType, Device, Epoch, Error, ErrorKind, Feature, GroupOptions, ProcessGroup,
    ProcessGroupExt, ReduceOp, Store, SubmitOptions, TcpStore, TcpStoreServer, Tensor, deadline_in,
};
use isolate::{IsolateOptions, IsolatedGroup};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use oneccl_sys::output::ENV_STDOUT;
use oneccl_sys::{Flavour, Library, ResultCode};

const CASE: &str = "OXCCL_LIFECYCLE_CASE";
const RANK: &str = "OXCCL_LIFECYCLE_RANK";
const STORE: &str = "OXCCL_LIFECYCLE_STORE";

/// What an isolated group sets in its child: the number of its own process.
const CHILD_OF: &str = "OXCCL_ISOLATE_CHILD";
/// For an environment that is written down before this process has a number.
const THIS_PROCESS: &str = "this process";
/// How many processes end while oneCCL loads its transport, two milliseconds apart.
const ENDS: u32 = 24;

type Outcome = Result<(), Failed>;

struct Rank {
    rank: u32,
    store: Arc<dyn Store>,
}

struct Case {
    name: &'static str,
    world: u32,
    /// All ranks live at the same time.
    together: bool,
    environment: &'static [(&'static str, &'static str)],
    body: fn(&Rank) -> Outcome,
    /// This rank kills itself.
    killed: Option<u32>,
}

/// Of a transport that oneCCL does not have, and what it says then.
const NO_TRANSPORT: &[(&str, &str)] = &[("CCL_ATL_TRANSPORT", "pigeons")];
const ITS_WORDS: &str = "CCL_ATL_TRANSPORT: unexpected value: pigeons";
/// Of a provider that libfabric does not have.
const NO_PROVIDER: &[(&str, &str)] = &[("FI_PROVIDER", "pigeons")];

const CASES: [Case; 15] = [
    Case {
        name: "the_librarys_own_words_are_in_the_error_of_all_ranks",
        world: 2,
        together: true,
        environment: NO_TRANSPORT,
        body: no_transport,
        killed: None,
    },
    Case {
        name: "the_librarys_own_words_come_through_a_child_process",
        world: 2,
        together: true,
        environment: NO_TRANSPORT,
        body: no_transport_in_a_child,
        killed: None,
    },
    Case {
        name: "a_communicator_that_does_not_start_is_the_librarys_error",
        world: 2,
        together: true,
        environment: NO_PROVIDER,
        body: no_provider,
        killed: None,
    },
    Case {
        name: "a_rank_that_waits_for_the_id_is_not_stuck_in_the_library",
        world: 2,
        together: true,
        environment: &[],
        body: no_id,
        killed: None,
    },
    Case {
        name: "the_words_of_a_call_on_a_live_communicator_are_read_and_it_goes_on",
        world: 1,
        together: true,
        environment: &[],
        body: raw::words_of_calls,
        killed: None,
    },
    Case {
        name: "l36_a_stuck_call_fails_at_its_deadline_and_the_process_lives",
        world: 2,
        together: true,
        environment: &[],
        body: stuck,
        killed: None,
    },
    Case {
        name: "l39_two_ranks_in_one_process_are_refused_instead_of_hanging",
        world: 1,
        together: true,
        environment: &[],
        body: threads,
        killed: None,
    },
    Case {
        name: "inv4_contributors_are_the_same_beside_the_data_and_in_calls",
        world: 3,
        together: true,
        environment: &[],
        body: contributors,
        killed: None,
    },
    Case {
        name: "l42_options_reach_the_library_and_the_children_of_a_split",
        world: 2,
        together: true,
        environment: &[],
        body: options,
        killed: None,
    },
    Case {
        name: "the_users_environment_is_never_overridden",
        world: 1,
        together: true,
        environment: &[("CCL_YIELD", "pause"), ("CCL_KVS_IFACE", "lo")],
        body: environment,
        killed: None,
    },
    Case {
        name: "the_librarys_log_stays_on_standard_output_for_who_asks",
        world: 2,
        together: true,
        environment: &[(ENV_STDOUT, "keep")],
        body: sum,
        killed: None,
    },
    Case {
        name: "messages_of_other_sizes_fail_on_both_sides_and_nobody_is_stuck",
        world: 2,
        together: true,
        environment: &[],
        body: messages,
        killed: None,
    },
    Case {
        name: "dropping_a_group_never_waits_and_a_process_may_end_while_the_library_is_still_loading",
        world: ENDS,
        together: false,
        environment: &[(CHILD_OF, THIS_PROCESS)],
        body: early_end,
        killed: None,
    },
    Case {
        name: "outside_isolated_groups_nothing_is_loaded_before_configure",
        world: 1,
        together: true,
        environment: &[],
        body: nothing_in_the_background,
        killed: None,
    },
    Case {
        name: "l27_the_death_of_a_rank_ends_the_others_work_at_once",
        world: 3,
        together: true,
        environment: &[],
        body: death,
        killed: Some(2),
    },
];

fn soon() -> Instant {
    deadline_in(Duration::from_secs(30))
}

fn ensure(ok: bool, text: impl FnOnce() -> String) -> Outcome {
    if ok { Ok(()) } else { Err(text().into()) }
}

fn configuration(rank: &Rank, world: u32, epoch: u64) -> Configuration {
    Configuration {
        store: rank.store.clone(),
        prefix: "lifecycle".into(),
        name: "lifecycle".into(),
        epoch: Epoch(epoch),
        rank: rank.rank,
        world_size: world,
        deadline: soon(),
        cancel: Default::default(),
    }
}

fn group(rank: &Rank, options: GroupOptions) -> Result<XcclGroup, Failed> {
    let group = XcclGroup::new("lifecycle", options)?;
    group.configure(configuration(rank, 2, 1))?;
    Ok(group)
}

/// What a failed `configure` says: the library's code, call and words.
fn said(e: &Error, call: &str, words: &str) -> Outcome {
    let text = e.to_string();
    ensure(
        e.kind() == ErrorKind::Backend && text.contains(call) && text.contains(words),
        || format!("{:?}: {text}", e.kind()),
    )
}

fn failed_start(rank: &Rank, group: &dyn ProcessGroup) -> Result<Error, Failed> {
    let failed = group.configure(configuration(rank, 2, 1)).err();
    failed.ok_or_else(|| "it started".into())
}

fn no_transport_of(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    let began = Instant::now();
    let e = failed_start(rank, group)?;
    said(&e, "onecclGetUniqueId failed", ITS_WORDS)?;
    let (code, peer) = match rank.rank {
        0 => (Some(i64::from(ResultCode::PLUGIN_EXCEPTION.0)), None),
        _ => (None, Some(0)),
    };
    ensure((e.code(), e.context().peer) == (code, peer), || {
        format!("{:?}, {:?}: {e}", e.code(), e.context().peer)
    })?;
    // Long before the deadline, which is 30 s away.
    ensure(began.elapsed() < Duration::from_secs(20), || {
        format!("{:?}", began.elapsed())
    })
}

fn no_transport(rank: &Rank) -> Outcome {
    no_transport_of(rank, &XcclGroup::new("lifecycle", GroupOptions::default())?)
}

fn no_transport_in_a_child(rank: &Rank) -> Outcome {
    no_transport_of(
        rank,
        &IsolatedGroup::new(IsolateOptions::new("xccl", Device::CPU))?,
    )
}

fn no_provider(rank: &Rank) -> Outcome {
    let group = XcclGroup::new("lifecycle", GroupOptions::default())?;
    let e = failed_start(rank, &group)?;
    said(
        &e,
        "onecclCommInitRank failed",
        "Plugin could not initialize communicator",
    )?;
    // One of the two may hear of the other's failure before it sees its own.
    let own = e.code() == Some(ResultCode::PLUGIN_EXCEPTION.0.into());
    ensure(own || e.to_string().contains("reports"), || {
        format!("{e}: {:?}", e.code())
    })
}

/// Rank 0 meets rank 1 as a group does, and fails when rank 1 waits for its id. Rank 1 may go on at once.
fn no_id(rank: &Rank) -> Outcome {
    if rank.rank == 0 {
        let version = Library::open(Flavour::Host)?.version;
        let terms = Terms {
            backend: "xccl",
            setup: format!("oneCCL {version}, contributors count, mismatch detection off"),
            one_per_process: true,
            credentials: None,
            door: Door::of("xccl"),
        };
        let configuration = configuration(rank, 2, 1);
        let meeting = peers::meet(&configuration, &terms)?;
        let store = meeting.store(&configuration);
        store.set("gate/0", b"1", soon())?;
        store.wait(&["gate/1"], soon())?;
        meeting.fail(&Error::new(ErrorKind::Backend, "no id today"));
        return Ok(rank.store.wait(&["rank 1 has seen it"], soon())?);
    }
    let group = XcclGroup::new("lifecycle", GroupOptions::default())?;
    let e = failed_start(rank, &group)?;
    ensure(e.to_string().contains("no id today"), || format!("{e}"))?;
    let alone = Configuration {
        deadline: deadline_in(Duration::from_millis(50)),
        ..configuration(rank, 2, 2)
    };
    let e = group.configure(alone).expect_err("no other rank came");
    ensure(e.kind() == ErrorKind::Timeout, || format!("{:?}: {e}", e.kind()))?;
    Ok(rank.store.set("rank 1 has seen it", b"1", soon())?)
}

/// Rank 2 is killed while the others are in a call of oneCCL, which tells them nothing.
fn death(rank: &Rank) -> Outcome {
    let group = XcclGroup::new("lifecycle", GroupOptions::default())?;
    group.configure(configuration(rank, 3, 1))?;
    let ones = || Tensor::from_vec(vec![1f32; 200_000]);
    group.all_reduce(ones(), ReduceOp::Sum)?.wait(soon())?;
    if rank.rank == 2 {
        rank.store.wait(&["0 is in it", "1 is in it"], soon())?;
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::KILL)?;
    }
    let op = Collective::AllReduce {
        tensors: vec![ones()],
        op: ReduceOp::Sum,
    };
    let work = group.run(op, SubmitOptions::by(deadline_in(Duration::from_secs(300))))?;
    rank.store.set(&format!("{} is in it", rank.rank), b"1", soon())?;
    // Long before its deadline.
    let e = work.wait(soon()).expect_err("a rank is gone");
    ensure(
        e.kind() == ErrorKind::PeerLost && e.context().peer == Some(2),
        || format!("{e}"),
    )
}

fn stuck(rank: &Rank) -> Outcome {
    let group = group(rank, GroupOptions::default())?;
    if rank.rank == 1 {
        // It never calls; the failure of the other one is told to it.
        let until = soon();
        while group.error().is_none() {
            ensure(Instant::now() < until, || "the failure was not told".into())?;
            std::thread::sleep(Duration::from_millis(5));
        }
        let e = group.error().unwrap();
        return ensure(
            e.kind() == ErrorKind::Timeout && e.context().peer == Some(0),
            || format!("{e}"),
        );
    }
    let op = Collective::AllReduce {
        tensors: vec![Tensor::zeros(DType::F32, 200_000)],
        op: ReduceOp::Sum,
    };
    let before = ftcore::leaked_bytes();
    let work = group.run(op, SubmitOptions::by(deadline_in(Duration::from_millis(600))))?;
    let later = group.all_reduce(Tensor::from_vec(vec![1f32]), ReduceOp::Sum)?;
    let e = work.wait(soon()).expect_err("no peer joined");
    ensure(
        e.kind() == ErrorKind::Timeout && e.to_string().contains("all_reduce #1"),
        || format!("{e}"),
    )?;
    ensure(ftcore::leaked_bytes() - before == 800_000, || {
        "the memory was not leaked and counted".into()
    })?;
    ensure(work.recover().is_empty(), || "memory in use came back".into())?;
    // What had not begun comes back whole.
    later.wait(soon()).expect_err("the group is poisoned");
    ensure(later.recover().len() == 1, || "an idle tensor was lost".into())?;
    let refused = group
        .configure(configuration(rank, 2, 2))
        .expect_err("a thread is stuck");
    ensure(
        refused.kind() == ErrorKind::InvalidState && refused.to_string().contains("replace the process"),
        || format!("{refused}"),
    )
}

/// True while a thread of this process loads the transport in the background.
fn is_loading() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").expect("a list of threads");
    threads
        .filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok())
        .any(|name| name.trim() == "ox-xccl-warm")
}

/// In the child of an isolated group the transport is loaded in the background from the first group on; each rank ends at
/// another moment of it. One after the other, since the crash that this is about was rare on a busy machine and one in eight on
/// an idle one. The group is dropped before the load is over, and the load goes on: the end of the process waits, not the drop.
fn early_end(rank: &Rank) -> Outcome {
    let group = XcclGroup::new("early", GroupOptions::default())?;
    std::thread::sleep(Duration::from_millis(2) * rank.rank);
    drop(group);
    let loading = i64::from(is_loading());
    let seen = rank.store.add("loading after the drop", loading, soon())?;
    // A machine that is wanted elsewhere may hold a rank up for as long as the load takes, but not half of them.
    ensure(rank.rank + 1 < ENDS || seen >= i64::from(ENDS) / 2, || {
        format!("only {seen} of {ENDS} drops returned before the load was over")
    })
}

fn nothing_in_the_background(_: &Rank) -> Outcome {
    let _group = XcclGroup::new("idle", GroupOptions::default())?;
    ensure(!is_loading(), || "it loads".into())
}

fn threads(rank: &Rank) -> Outcome {
    let began = Instant::now();
    let results: Vec<_> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|own| {
                scope.spawn(move || {
                    let rank = Rank {
                        rank: own,
                        store: rank.store.clone(),
                    };
                    XcclGroup::new("threads", GroupOptions::default())?.configure(configuration(&rank, 2, 1))
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().expect("no panic")).collect()
    });
    for result in results {
        let e = result.expect_err("two ranks in one process");
        ensure(
            e.kind() == ErrorKind::Unsupported && e.to_string().contains("one process"),
            || format!("{e}"),
        )?;
    }
    ensure(began.elapsed() < Duration::from_secs(15), || {
        "it took too long".into()
    })
}

fn options(rank: &Rank) -> Outcome {
    let mut options = GroupOptions {
        net_name: Some("lo".into()),
        ..Default::default()
    };
    options.hints.insert("contributors".into(), "off".into());
    let group = group(rank, options)?;
    for variable in oneccl_sys::environment::INTERFACE {
        ensure(std::env::var(variable).is_ok_and(|v| v == "lo"), || {
            format!("{variable} is not set")
        })?;
    }
    let child = group
        .split(Some(7), rank.rank, soon())?
        .expect("a colour was given");
    for g in [&group as &dyn ProcessGroup, child.as_ref()] {
        ensure(!g.capabilities().has(Feature::Contributors), || {
            "contributors are counted".into()
        })?;
        let average = g.all_reduce(Tensor::from_vec(vec![rank.rank as f32]), ReduceOp::Avg)?;
        let average = average.take_tensor()?;
        let average = average.as_slice::<f32>()?;
        ensure(average == [0.5], || format!("the average is {average:?}"))?;
    }
    // One interface per process.
    let other = XcclGroup::new(
        "other",
        GroupOptions {
            net_name: Some("eth7".into()),
            ..Default::default()
        },
    );
    let e = other.err().expect("another interface");
    ensure(e.kind() == ErrorKind::Conflict, || format!("{e}"))?;
    let refused = XcclGroup::new(
        "other",
        GroupOptions {
            cga_cluster_size: Some(2),
            ..Default::default()
        },
    );
    ensure(refused.is_err(), || "cga_cluster_size was accepted".into())?;
    child.shutdown(soon())?;
    Ok(group.shutdown(soon())?)
}

/// True if this process has the file in which ranks of one host write down who contributes.
fn writes_down() -> bool {
    let open = std::fs::read_dir("/proc/self/fd").expect("a list of descriptors");
    open.filter_map(|l| std::fs::read_link(l.ok()?.path()).ok())
        .any(|l| l.to_string_lossy().contains("memfd:oxccl-xccl"))
}

fn contributors(rank: &Rank) -> Outcome {
    for (epoch, how) in [(1, "count"), (2, "call")] {
        let mut options = GroupOptions::default();
        options.hints.insert("contributors".into(), how.into());
        let group = XcclGroup::new("contributors", options)?;
        group.configure(configuration(rank, 3, epoch))?;
        ensure(writes_down() == (how == "count"), || {
            format!("'{how}', but written down: {}", writes_down())
        })?;
        // Another rank leaves itself out each time; the sizes are on both sides of what travels with the data.
        for (absent, count) in [(3, 3000), (2, 3000), (0, 300_000), (1, 3), (2, 0)] {
            let options = || SubmitOptions {
                contribute: rank.rank != absent,
                ..SubmitOptions::by(soon())
            };
            let want = if absent > 2 { 3 } else { 2 };
            let mine = || Tensor::from_vec(vec![6f32; count]);
            let average = Collective::AllReduce {
                tensors: vec![mine()],
                op: ReduceOp::Avg,
            };
            let together = Collective::AllReduce {
                tensors: vec![mine(), mine()],
                op: ReduceOp::Max,
            };
            let scattered = Collective::ReduceScatterInto {
                pairs: vec![(mine(), Tensor::zeros(DType::F32, count / 3))],
                op: ReduceOp::Avg,
            };
            for op in [average, together, scattered] {
                let done = group.run_blocking(op, options())?;
                let kind = || format!("'{how}', {count} elements, without rank {absent}");
                ensure(done.contributors == want, || {
                    format!("{}: {} contributors, not {want}", kind(), done.contributors)
                })?;
                let result = done.into_tensor()?;
                let fine = result.as_slice::<f32>()?.iter().all(|x| *x == 6.0);
                ensure(fine, || {
                    format!(
                        "{}: {:?}",
                        kind(),
                        result.as_slice::<f32>().ok().and_then(|s| s.first())
                    )
                })?;
            }
        }
        small_sums(rank, &group)?;
        group.shutdown(soon())?;
    }
    Ok(())
}

/// Sums that have the count behind them, in each type that travels in its own way.
fn small_sums(rank: &Rank, group: &XcclGroup) -> Outcome {
    let dtypes = DType::ALL.into_iter();
    for dtype in dtypes.filter(|d| group.capabilities().reduces(ReduceOp::Sum, *d)) {
        for absent in [1, 3] {
            let op = Collective::AllReduce {
                tensors: vec![Tensor::zeros(dtype, 5)],
                op: ReduceOp::Sum,
            };
            let options = SubmitOptions {
                contribute: rank.rank != absent,
                ..SubmitOptions::by(soon())
            };
            let done = group.run_blocking(op, options)?;
            let want = if absent > 2 { 3 } else { 2 };
            ensure(done.contributors == want, || {
                format!("{dtype}: {} contributors, not {want}", done.contributors)
            })?;
            let sum = done.into_tensor()?;
            ensure(sum.bytes().iter().all(|b| *b == 0), || {
                format!("{dtype}: zeros add up to {:?}", sum.bytes())
            })?;
        }
    }
    Ok(())
}

fn environment(_: &Rank) -> Outcome {
    XcclFactory.probe()?;
    let is = |name: &str, value: &str| {
        let found = std::env::var(name);
        ensure(found.as_deref() == Ok(value), || {
            format!("{name} is {found:?}, not {value}")
        })
    };
    is("CCL_YIELD", "pause")?;
    is("CCL_KVS_IFACE", "lo")?;
    is("CCL_PLUGIN", "ONECCL_LEGACY_CPU")
}

fn messages(rank: &Rank) -> Outcome {
    let group = group(rank, GroupOptions::default())?;
    let e = if rank.rank == 0 {
        group.send(Tensor::from_vec(vec![1f32; 3]), 1, 0)?.wait(soon())
    } else {
        group.recv(Tensor::zeros(DType::F32, 4), 0, 0)?.wait(soon())
    }
    .expect_err("three elements are not four");
    ensure(
        e.kind() == ErrorKind::Mismatch && e.to_string().contains("3 elements"),
        || format!("{e}"),
    )?;
    // Neither side was in a call: the process is as good as new.
    rank.store.barrier("failed", 2, soon())?;
    group.configure(configuration(rank, 2, 2))?;
    let sum = group
        .all_reduce(Tensor::from_vec(vec![1i32]), ReduceOp::Sum)?
        .take_tensor()?;
    ensure(sum.as_slice::<i32>()? == [2], || {
        "the next epoch sums wrongly".into()
    })?;
    Ok(group.shutdown(soon())?)
}

/// One communicator, one call.
fn sum(rank: &Rank) -> Outcome {
    let group = group(rank, GroupOptions::default())?;
    group
        .all_reduce(Tensor::from_vec(vec![1i32]), ReduceOp::Sum)?
        .wait(soon())?;
    Ok(group.shutdown(soon())?)
}

fn run(case: &Case) -> Outcome {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let program = std::env::current_exe()?;
    let value = |value: &str| match value {
        THIS_PROCESS => std::process::id().to_string(),
        value => value.to_string(),
    };
    let environment: Vec<_> = case.environment.iter().map(|(n, v)| (*n, value(v))).collect();
    let start = |rank: u32| {
        let mut command = Command::new(&program);
        // What this shell has set for oneCCL must not decide a test about the environment.
        for (name, _) in std::env::vars().filter(|(n, _)| n.starts_with("CCL_") || n.starts_with("FI_")) {
            command.env_remove(name);
        }
        command.env_remove(ENV_STDOUT);
        command
            .env(CASE, case.name)
            .env(RANK, rank.to_string())
            .env(STORE, format!("127.0.0.1:{}", server.port()))
            .envs(environment.iter().map(|(name, value)| (name, value.as_str())))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
    };
    let outputs = if case.together {
        let ranks = (0..case.world).map(start).collect::<Result<Vec<_>, _>>()?;
        ranks.into_iter().map(Child::wait_with_output).collect::<Vec<_>>()
    } else {
        (0..case.world)
            .map(|rank| start(rank)?.wait_with_output())
            .collect()
    };
    let mut failures = String::new();
    for (rank, output) in (0..).zip(outputs) {
        let output = output?;
        if case.killed == Some(rank) && output.status.signal() == Some(9) {
            continue;
        }
        // oneCCL always has a warning to log when a communicator starts; the ranks themselves print nothing.
        let said = String::from_utf8_lossy(&output.stdout);
        let kept = case.environment.iter().any(|(name, _)| *name == ENV_STDOUT);
        if said.contains("CCL_WARN") != kept || said.is_empty() == kept {
            failures += &format!("on standard output: '{said}'\n");
        }
        if !output.status.success() {
            failures += &format!("{}: {}\n", output.status, String::from_utf8_lossy(&output.stderr));
        }
    }
    ensure(failures.is_empty(), || failures.clone())
}

fn child(name: &str) -> Outcome {
    let address = std::env::var(STORE)?;
    let rank = Rank {
        rank: std::env::var(RANK)?.parse()?,
        store: Arc::new(TcpStore::connect(&address, soon())?),
    };
    let case = CASES.iter().find(|c| c.name == name).ok_or("no such case")?;
    (case.body)(&rank)
}

fn main() -> ExitCode {
    let name = std::env::var(CASE).ok();
    let case = CASES.iter().find(|c| Some(c.name) == name.as_deref());
    // One case plays such a child itself.
    if case.is_none_or(|c| c.environment.iter().all(|(name, _)| *name != CHILD_OF)) {
        isolate::run_child_if_asked();
    }
    if let Some(name) = name {
        return match child(&name) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failed) => {
                eprintln!("{}", failed.message().unwrap_or("failed"));
                ExitCode::FAILURE
            }
        };
    }
    let reason = XcclFactory.probe().err().map(|e| e.to_string());
    let trial = |name: &str, body: Box<dyn FnOnce() -> Outcome + Send>| {
        let reason = reason.clone();
        Trial::ignorable_test(name, move || match reason {
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => body().map(|()| Completion::Completed),
        })
    };
    let is_long = std::env::var_os("OXCCL_LONG").is_some();
    let mut trials: Vec<Trial> = CASES
        .iter()
        .map(|case| trial(case.name, Box::new(|| run(case))))
        .collect();
    trials.push(trial("the_measurement_of_overhead_runs", Box::new(overhead)).with_ignored_flag(!is_long));
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// `xccl_overhead`, small and not optimised: its figures mean nothing here.
fn overhead() -> Outcome {
    let output = conformance::cargo()
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args([
            "run",
            "--quiet",
            "--example",
            "xccl_overhead",
            "--",
            "1",
            "1",
            "2",
            "1024",
        ])
        .output()?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure(output.status.success() && said.contains("plain/again"), || {
        format!(
            "{}: {said}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
    })
}

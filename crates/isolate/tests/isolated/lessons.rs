//! Faults of other systems that must not come back (LESSONS), and what a misbehaving backend may do to its parent: nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ftcore::{
    Collective, DType, Device, DeviceKind, Epoch, ErrorKind, Event, Feature, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, Store, Stream, SubmitOptions, Tensor, deadline_in,
};
use oxccl_isolate::{Helper, IsolateOptions, IsolatedGroup};
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::*;

pub(crate) const TESTS: &[(&str, fn())] = &[
    (
        "lessons::l09_an_event_that_is_not_reached_orders_the_operation",
        l09,
    ),
    (
        "lessons::l18_inputs_are_never_written_whatever_the_backend_does",
        l18,
    ),
    (
        "lessons::l36_a_wedged_child_costs_a_time_out_and_the_process_lives",
        l36,
    ),
    ("lessons::l36_abort_ends_a_backend_that_cannot_abort", l36_abort),
    (
        "lessons::l36_a_deadline_that_is_long_past_is_a_time_out",
        l36_long_past,
    ),
    (
        "lessons::l27_ranks_of_a_backend_that_tells_nobody_hear_of_aborts_and_deaths",
        l27,
    ),
    (
        "lessons::l39_results_are_not_swapped_between_waiting_threads",
        l39_swapped,
    ),
    (
        "lessons::l39_after_a_crash_everything_pending_fails_and_error_is_set",
        l39_crash,
    ),
    ("lessons::l42_the_backend_sees_every_option_on_every_path", l42),
    (
        "lessons::l42_texts_and_variables_are_the_options_that_the_backend_sees",
        l42_texts,
    ),
    ("lessons::errors_keep_their_kind_and_code", typed),
    ("lessons::noise_of_a_child_disturbs_nothing", noise),
    (
        "lessons::memory_that_a_backend_keeps_comes_back_with_the_end_of_its_child",
        kept_memory,
    ),
    (
        "lessons::programs_that_do_not_serve_and_devices_that_do_not_cross_are_refused",
        refused,
    ),
    ("lessons::the_store_of_the_parent_serves_the_child", store),
    (
        "lessons::a_wrapped_backend_keeps_its_name_and_gets_abort",
        wrapped,
    ),
];

/// A stream whose event is reached when the test says so.
struct Slow(Arc<AtomicBool>);

impl Event for Slow {
    fn query(&self) -> Result<bool> {
        Ok(self.0.load(Ordering::SeqCst))
    }
    fn synchronize(&self, deadline: Instant) -> Result<()> {
        while !self.0.load(Ordering::SeqCst) {
            if Instant::now() > deadline {
                return Err(ftcore::Error::timeout("the event was not reached"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

impl Stream for Slow {
    fn device(&self) -> Device {
        Device::CPU
    }
    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(Slow(self.0.clone())))
    }
    fn wait(&self, event: &dyn Event) -> Result<()> {
        event.synchronize(soon())
    }
    fn query(&self) -> Result<bool> {
        Ok(self.0.load(Ordering::SeqCst))
    }
    fn synchronize(&self, deadline: Instant) -> Result<()> {
        Event::synchronize(self, deadline)?;
        Ok(())
    }
}

fn l09() {
    let group = alone(options("gloo"));
    let reached = Arc::new(AtomicBool::new(false));
    let tensor = group.alloc(DType::F32, &[4]).unwrap();
    // The work of the stream: writes the input, then reaches the event.
    let address = tensor.as_ptr() as usize;
    let submit = |deadline| {
        let op = Collective::AllReduce {
            tensors: vec![Tensor::zeros(DType::F32, 4)],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            stream: Some(Arc::new(Slow(reached.clone()))),
            ..SubmitOptions::by(deadline)
        };
        group.run(op, options)
    };
    let e = submit(deadline_in(Duration::from_millis(30))).unwrap_err();
    assert_eq!(
        e.error.kind(),
        ErrorKind::Timeout,
        "an event that was never reached was passed over"
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let work = submit(soon()).unwrap();
            assert!(
                reached.load(Ordering::SeqCst),
                "the operation began before its event"
            );
            work.wait(soon()).unwrap();
        });
        std::thread::sleep(Duration::from_millis(20));
        reached.store(true, Ordering::SeqCst);
        waiting.join().unwrap();
    });
    assert_eq!(tensor.as_ptr() as usize, address);
}

fn l18() {
    let group = alone(odd("vandal"));
    let ones = || Tensor::from_vec(vec![1f32; 100]);
    let op = Collective::ReduceScatter {
        inputs: vec![ones()],
        output: ones(),
        op: ReduceOp::PremulSum(0.5),
    };
    let tensors = group
        .run(op, SubmitOptions::default())
        .unwrap()
        .take()
        .unwrap()
        .tensors;
    assert_eq!(
        tensors[0].as_slice::<f32>().unwrap(),
        [1.0; 100],
        "the input was written"
    );
    assert_eq!(tensors[1].bytes()[0], 0xEE, "the output was not");
    for op in [
        Collective::Broadcast {
            tensors: vec![ones()],
            root: 0,
        },
        Collective::AllGather {
            input: ones(),
            outputs: vec![ones()],
        },
        Collective::AllToAll {
            inputs: vec![ones()],
            outputs: vec![ones()],
        },
        Collective::Gather {
            input: ones(),
            outputs: vec![ones()],
            root: 0,
        },
    ] {
        let kind = op.kind();
        let tensors = group
            .run(op, SubmitOptions::default())
            .unwrap()
            .take()
            .unwrap()
            .tensors;
        assert_eq!(tensors[0].as_slice::<f32>().unwrap(), [1.0; 100], "{kind}");
    }
}

fn l36() {
    for orders in ["hang", "block"] {
        let group = alone(with_timeout(odd(orders), Duration::from_millis(200)));
        let pid = group.child_pid().unwrap();
        let began = Instant::now();
        let works: Vec<_> = (0..3)
            .map(|i| {
                let t = if i == 0 {
                    group.alloc(DType::U8, &[5]).unwrap()
                } else {
                    Tensor::zeros(DType::U8, 5)
                };
                group.all_reduce(t, ReduceOp::Sum).unwrap()
            })
            .collect();
        for work in &works {
            let e = work.wait(soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
            assert!(e.to_string().contains("all_reduce #1"), "{e}");
            eventually("the tensor", || work.recover().len() == 1);
        }
        // L35: from the submission, 200 ms and the margin of 1.5 s.
        assert!(
            began.elapsed() > Duration::from_millis(1600),
            "{:?}",
            began.elapsed()
        );
        assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
        eventually("the end of the child", || state_of(pid).is_none());
        let e = group.barrier().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Poisoned, "{e}");
        group.configure(configuration(&Arc::default(), 2, 0, 1)).unwrap();
    }
}

fn l36_abort() {
    for orders in ["hang", "block"] {
        let group = alone(odd(orders));
        assert!(group.capabilities().has(Feature::Abort) && group.capabilities().has(Feature::Reconfigure));
        let work = group
            .all_reduce(Tensor::from_vec(vec![1u8; 5]), ReduceOp::Sum)
            .unwrap();
        let shared = group.alloc(DType::U8, &[5]).unwrap();
        let direct = group.all_reduce(shared, ReduceOp::Sum).unwrap();
        let pid = group.child_pid().unwrap();
        work.abort("wedged");
        for work in [work, direct] {
            let e = work.wait(soon()).unwrap_err();
            assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
            assert!(e.to_string().contains("wedged"), "{e}");
            assert_eq!(work.recover().len(), 1);
        }
        eventually("the end of the child", || state_of(pid).is_none());
        assert_eq!(group.error().unwrap().kind(), ErrorKind::Aborted);
    }
}

fn l27() {
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let store = &store;
            scope.spawn(move || {
                let meet = |what: &str| store.barrier(what, 3, soon()).unwrap();
                let group = IsolatedGroup::new(odd("hang")).unwrap();
                let begin = |epoch: u64| {
                    group.configure(configuration(store, epoch, rank, 3)).unwrap();
                    let work = group
                        .all_reduce(Tensor::zeros(DType::F32, 10), ReduceOp::Sum)
                        .unwrap();
                    meet(&format!("begun {epoch}"));
                    work
                };
                let work = begin(1);
                if rank == 0 {
                    group.abort("enough");
                }
                let e = work.wait(soon()).unwrap_err();
                assert_eq!(e.kind(), ErrorKind::Aborted, "rank {rank}: {e}");
                assert!(
                    e.to_string().contains("enough") && e.to_string().contains("rank 0"),
                    "{e}"
                );
                assert_eq!(group.error().unwrap().kind(), ErrorKind::Aborted);

                let work = begin(2);
                if rank == 1 {
                    kill(group.child_pid().unwrap());
                }
                let e = work.wait(soon()).unwrap_err();
                if rank == 1 {
                    assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}");
                } else {
                    // What rank 1's parent says, or the end of its child's process.
                    assert!(
                        matches!(e.kind(), ErrorKind::Unavailable | ErrorKind::PeerLost),
                        "{e}"
                    );
                    assert_eq!(e.context().peer, Some(1), "{e}");
                }

                let work = begin(3);
                if rank == 2 {
                    drop(group);
                    assert_eq!(work.wait(soon()).unwrap_err().kind(), ErrorKind::Aborted);
                    return;
                }
                let e = work.wait(soon()).unwrap_err();
                assert_eq!(
                    (e.kind(), e.context().peer),
                    (ErrorKind::Aborted, Some(2)),
                    "rank {rank}: {e}"
                );
            });
        }
    });
}

fn l39_swapped() {
    let groups: Vec<IsolatedGroup> = (0..2)
        .map(|_| IsolatedGroup::new(options("gloo")).unwrap())
        .collect();
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        for (rank, group) in (0u32..).zip(&groups) {
            let store = &store;
            scope.spawn(move || {
                group.configure(configuration(store, 1, rank, 2)).unwrap();
                // Many threads, point-to-point with a tag each: they end in any order.
                std::thread::scope(|scope| {
                    for tag in 0..8u32 {
                        scope.spawn(move || {
                            for i in 0..30u64 {
                                let value = u64::from(tag) * 1000 + i;
                                let n = 1 + (value as usize * 37) % 5000;
                                if rank == 0 {
                                    let work = group.send(Tensor::from_vec(vec![value; n]), 1, tag).unwrap();
                                    work.wait(soon()).unwrap();
                                } else {
                                    let work = group.recv(Tensor::zeros(DType::U64, n), 0, tag).unwrap();
                                    let got = work.take_tensor().unwrap().into_vec::<u64>().unwrap();
                                    assert_eq!(got, vec![value; n]);
                                }
                            }
                        });
                    }
                });
            });
        }
    });
}

fn l39_crash() {
    for (orders, code, text) in [("crash", -6, "SIGABRT"), ("exit", 7, "status 7")] {
        let group = alone(odd(orders));
        let works: Vec<_> = (0..5)
            .filter_map(|_| {
                group
                    .all_reduce(Tensor::from_vec(vec![1f32; 9]), ReduceOp::Sum)
                    .ok()
            })
            .collect();
        assert!(!works.is_empty());
        for work in &works {
            let e = work.wait(soon()).unwrap_err();
            assert_eq!((e.kind(), e.code()), (ErrorKind::Unavailable, Some(code)), "{e}");
            assert!(e.to_string().contains(text), "{e}");
            assert!(
                orders != "crash" || e.to_string().contains("the library's last line"),
                "{e}"
            );
            assert_eq!(work.recover().len(), 1);
        }
        let e = group.error().expect("the group knows");
        assert!(e.to_string().contains(text), "{e}");
        assert!(e.is_retryable());
        group.configure(configuration(&Arc::default(), 2, 0, 1)).unwrap();
        assert!(group.error().is_none());
    }
}

fn l42() {
    let mut o = odd("");
    o.spare = true;
    o.options.timeout = Duration::from_millis(12_345);
    o.options.net_name = Some("lo".into());
    o.options.min_ctas = Some(3);
    o.options.hints.insert("other".into(), "a=b".into());
    let want = format!("{:?}", o.options);
    let group = alone(o.clone());
    assert_eq!(&*group.info().name, want, "create");
    let part = group.split(Some(0), 0, soon()).unwrap().unwrap();
    assert_eq!(&*part.info().name, want, "split");
    drop(part);
    eventually("the spare", || group.spare_pid().is_some());
    let spare = group.spare_pid();
    group.configure(configuration(&Arc::default(), 2, 0, 1)).unwrap();
    assert_eq!(
        (&*group.info().name, group.child_pid()),
        (want.as_str(), spare),
        "spare"
    );
    group.abort("again");
    group.configure(configuration(&Arc::default(), 3, 0, 1)).unwrap();
    assert_eq!(&*group.info().name, want, "configure after abort");
    // INV-9: refused by the backend, by name, before anything runs; or dropped as asked for.
    o.options.max_ctas = Some(1);
    let e = IsolatedGroup::new(o.clone()).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::InvalidArgument, "{e}");
    assert!(
        e.to_string().contains("max_ctas") && e.to_string().contains("odd"),
        "{e}"
    );
    o.options.lenient = true;
    let group = alone(o);
    assert_eq!(group.info().dropped_options, ["max_ctas"]);
    assert!(
        !group.info().name.contains("max_ctas: Some"),
        "{}",
        group.info().name
    );
}

/// Texts arrive as the options that they mean, those of variables too, which are the child's as well.
fn l42_texts() {
    let mut o = odd("");
    o.options.hints.insert("minCtas".into(), "3".into());
    o.options.hints.insert("OTHER".into(), "said".into());
    let seen = alone(o).info().name;
    assert!(seen.contains("min_ctas: Some(3)"), "{seen}");
    assert!(seen.contains("\"other\": \"said\""), "{seen}");
    for (variables, says) in [
        (vec![("OXCCL_ODD_MIN_CTAS", "4")], "min_ctas: Some(4)"),
        (vec![("OXCCL_ODD_OTHER", "b")], "\"other\": \"b\""),
        (vec![("OXCCL_ODD_MIN_CTA", "4")], "do you mean min_ctas?"),
        (
            vec![("OXCCL_ODD_MAX_CTAS", "4"), ("OXCCL_ODD_LENIENT", "1")],
            "dropped: [\"max_ctas\"]",
        ),
    ] {
        let this = std::env::current_exe().unwrap();
        let told = std::process::Command::new(this)
            .env(TELL, "1")
            .envs(variables)
            .output()
            .unwrap();
        let told = String::from_utf8(told.stdout).unwrap();
        assert!(told.contains(says), "no '{says}' in {told}");
    }
}

/// Asks this program to say what an isolated group was told, or what [`LATE`] ends with.
const TELL: &str = "OXCCL_ISOLATE_TEST_TELL";
/// A blocking call on borrowed memory with a deadline that is long past, as of a process that was stopped, on a child that does not answer.
const LATE: &str = "late";

/// The process that says it.
pub(crate) fn as_teller() -> Option<std::process::ExitCode> {
    if std::env::var_os(TELL)? == LATE {
        let group = alone(options("gloo"));
        let child = Pid::from_raw(i32::try_from(group.child_pid().unwrap()).unwrap()).unwrap();
        kill_process(child, Signal::STOP).unwrap();
        let past = Instant::now() - Duration::from_secs(30);
        let error = group
            .all_reduce_slice_with(&mut [1.0f32; 8], ReduceOp::Sum, SubmitOptions::by(past))
            .unwrap_err();
        println!("{:?}", error.kind());
        return Some(std::process::ExitCode::SUCCESS);
    }
    match IsolatedGroup::new(odd("")) {
        Ok(group) => {
            let info = group.info();
            group.configure(configuration(&Arc::default(), 1, 0, 1)).unwrap();
            println!("{} dropped: {:?}", group.info().name, info.dropped_options);
        }
        Err(error) => println!("{error}"),
    }
    Some(std::process::ExitCode::SUCCESS)
}

/// In a program of its own: a call that returns while its memory is still in use ends that by SIGABRT.
fn l36_long_past() {
    // The engine's clock may be first: not always.
    for _ in 0..3 {
        let this = std::env::current_exe().unwrap();
        let told = std::process::Command::new(this).env(TELL, LATE).output().unwrap();
        assert!(told.status.success(), "{told:?}");
        assert_eq!(
            String::from_utf8_lossy(&told.stdout).trim(),
            "Timeout",
            "{told:?}"
        );
    }
}

fn typed() {
    let group = IsolatedGroup::new(odd("fail configure")).unwrap();
    let e = group
        .configure(configuration(&Arc::default(), 1, 0, 1))
        .unwrap_err();
    assert_eq!(
        (e.kind(), e.code(), e.message()),
        (ErrorKind::Backend, Some(42), "no route"),
        "{e}"
    );
    assert_eq!(
        (e.context().op, e.context().epoch),
        (Some("configure"), Some(Epoch(1)))
    );
    let e = group.barrier().unwrap_err();
    assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
    let e = IsolatedGroup::new(options("glo")).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::NotFound);
    assert!(e.to_string().contains("Did you mean 'gloo'"), "{e}");
}

fn noise() {
    let group = alone(odd("noise"));
    for _ in 0..5 {
        let t = Tensor::from_vec((0..1000i32).collect());
        let back = group.all_reduce(t, ReduceOp::Sum).unwrap().take_tensor().unwrap();
        assert_eq!(back.into_vec::<i32>().unwrap(), (0..1000).collect::<Vec<_>>());
    }
    let pid = group.child_pid().unwrap();
    kill(pid);
    eventually("the notice", || group.error().is_some());
    let text = group.error().unwrap().to_string();
    assert!(text.contains("noise 1999 on std"), "{text}");
    assert!(text.lines().count() <= 30, "{text}");
}

fn kept_memory() {
    let group = alone(odd("keep"));
    let staged = group
        .all_reduce(Tensor::from_vec(vec![1u8; 8]), ReduceOp::Sum)
        .unwrap();
    let e = staged.wait(soon()).unwrap_err();
    assert_eq!((e.kind(), e.code()), (ErrorKind::Backend, Some(11)), "{e}");
    assert_eq!(
        staged.recover().len(),
        1,
        "the caller's own memory was never touched"
    );
    let pid = group.child_pid().unwrap();
    group.configure(configuration(&Arc::default(), 2, 0, 1)).unwrap();
    assert_ne!(
        group.child_pid(),
        Some(pid),
        "a child that keeps memory was used again"
    );
    let direct = group
        .all_reduce(group.alloc(DType::U8, &[8]).unwrap(), ReduceOp::Sum)
        .unwrap();
    let e = direct.wait(soon()).unwrap_err();
    assert_eq!((e.kind(), e.code()), (ErrorKind::Backend, Some(11)), "{e}");
    assert_eq!(
        direct.recover().len(),
        1,
        "the child is gone, and its claim with it"
    );
    assert_eq!(ftcore::leaked_bytes(), 0);
}

fn refused() {
    let program = |p: &str, timeout: u64| IsolateOptions {
        helper: Helper::Program(p.into()),
        start_timeout: Duration::from_millis(timeout),
        ..options("gloo")
    };
    let e = IsolatedGroup::new(program("/no/such/program", 30_000))
        .err()
        .unwrap();
    assert_eq!(e.kind(), ErrorKind::Unavailable);
    assert!(e.to_string().contains("/no/such/program"), "{e}");
    let e = IsolatedGroup::new(program("/bin/false", 30_000)).err().unwrap();
    assert!(e.to_string().contains("status 1"), "{e}");
    // Reads the greeting as its input and prints it: noise, not an answer.
    let e = IsolatedGroup::new(program("/bin/cat", 300)).err().unwrap();
    assert_eq!(e.kind(), ErrorKind::Timeout, "{e}");
    assert!(e.to_string().contains("run_child_if_asked"), "{e}");
    let e = IsolatedGroup::new(odd("crash at start")).err().unwrap();
    assert!(e.to_string().contains("SIGABRT"), "{e}");
    let mut slow = odd("hang at start");
    slow.start_timeout = Duration::from_millis(300);
    assert_eq!(IsolatedGroup::new(slow).err().unwrap().kind(), ErrorKind::Timeout);
    for kind in [DeviceKind::Cuda, DeviceKind::Xpu] {
        let e = IsolatedGroup::new(IsolateOptions::new("odd", Device::new(kind, 0)))
            .err()
            .unwrap();
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains("host memory"), "{e}");
    }
    eventually("the end of all children", || children().is_empty());
}

fn store() {
    let group = IsolatedGroup::new(odd("use the store")).unwrap();
    let store = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let configuring = scope.spawn(|| group.configure(configuration(&store, 1, 0, 1)));
        assert_eq!(store.get("test/1/hello", soon()).unwrap(), b"from the child");
        store.set("answer", b"", soon()).unwrap();
        configuring.join().unwrap().unwrap();
    });
}

fn wrapped() {
    let registry = ftcore::Registry::new();
    let plain = ftcore::Registry::global().get("odd", None).unwrap();
    let backend = oxccl_isolate::wrap(&plain, IsolateOptions::new("odd", Device::CPU));
    assert_eq!(
        (&backend.name, &backend.device, &backend.source),
        (&plain.name, &plain.device, &plain.source)
    );
    registry
        .register(backend, ftcore::registry::OnConflict::Keep)
        .unwrap();
    let offered = registry.get("odd", None).unwrap().factory.capabilities();
    assert!(offered.has(Feature::Abort) && !plain.factory.capabilities().has(Feature::Abort));
    assert_eq!(offered.devices, ["cpu"], "memory of an xpu cannot cross");
    let group = registry.create("odd", &Device::CPU, &Default::default()).unwrap();
    assert_eq!(*group.capabilities(), offered);
    group.configure(configuration(&Arc::default(), 1, 0, 1)).unwrap();
    assert_eq!(&*group.info().backend, "odd");
    group.barrier().unwrap();
}

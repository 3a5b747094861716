//! A Rust plugin that panics where it is told to, and brings a device kind.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ftcore::registry::{Backend, OnConflict, Unavailable};
use ftcore::{
    Collective, DType, Device, DeviceKind, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp,
    Registry, SubmitOptions, Tensor, accelerator, deadline_in,
};
use libtest_mimic::Trial;
use oxccl_plugin::{Loaded, load};

use crate::ranks::{backend, configuration, soon, with_ranks};
use crate::{Outcome, ensure, text, trial};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Collects every log line of this program.
pub(crate) fn listen() {
    struct Line(Vec<u8>);
    impl std::io::Write for Line {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.extend(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    impl Drop for Line {
        fn drop(&mut self) {
            let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
            lines.push(String::from_utf8_lossy(&self.0).into_owned());
        }
    }
    tracing_subscriber::fmt()
        .with_ansi(false)
        .with_writer(|| Line(Vec::new()))
        .init();
}

pub(crate) fn logged(words: &[&str]) -> bool {
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    lines.iter().any(|l| words.iter().all(|w| l.contains(w)))
}

pub(crate) fn library() -> Outcome<PathBuf> {
    conformance::dylib("odd-plugin")
}

fn odd() -> Outcome<Loaded> {
    load(&library()?).map_err(text)
}

pub(crate) fn trials() -> Vec<Trial> {
    let places = [
        "create",
        "configure",
        "submit",
        "execute",
        "info",
        "capabilities",
        "split",
        "abort",
        "error",
        "shutdown",
        "traffic",
        "drop",
    ];
    let mut trials: Vec<Trial> = places
        .into_iter()
        .map(|place| {
            let name = format!("odd::a_panic_in_{place}_ends_that_group_and_nothing_else");
            trial(&name, move || panics_in(place))
        })
        .collect();
    trials.push(trial(
        "odd::log_events_of_a_plugin_arrive_in_the_program_s_log",
        || {
            panics_in("submit")?;
            ensure!(
                logged(&[
                    "INFO",
                    "oxccl_plugin",
                    "plugin=\"odd\"",
                    "about to panic place=\"submit\""
                ]),
                "{:?}",
                LINES.lock().unwrap_or_else(PoisonError::into_inner)
            );
            Ok(())
        },
    ));
    trials.push(trial(
        "odd::a_typed_reason_and_the_library_behind_it_arrive",
        unusable,
    ));
    trials.push(trial(
        "odd::a_device_kind_of_a_plugin_allocates_copies_and_orders",
        device,
    ));
    trials.push(trial(
        "odd::a_collective_on_a_plugin_s_device_is_ordered_by_its_streams",
        toy,
    ));
    trials
}

fn make(panics: &Backend, place: &str) -> Result<Box<dyn ProcessGroup>, ftcore::Error> {
    let options = GroupOptions {
        hints: [("panic_in".to_string(), place.to_string())].into(),
        ..Default::default()
    };
    panics.factory.create(&Device::CPU, &options)
}

fn alone(group: &dyn ProcessGroup, epoch: u64) -> ftcore::Result<()> {
    let store: std::sync::Arc<dyn ftcore::Store> = std::sync::Arc::new(ftcore::InMemoryStore::new());
    group.configure(configuration(&store, epoch, 0, 1))
}

fn sums(group: &dyn ProcessGroup) -> Result<Tensor, ftcore::Error> {
    group
        .all_reduce(Tensor::from_vec(vec![1.5f32]), ReduceOp::Sum)?
        .take_tensor()
}

fn panics_in(place: &str) -> Outcome {
    let panics = backend(&odd()?, "panics")?;
    let healthy = make(&panics, "nowhere").map_err(text)?;
    alone(&*healthy, 1).map_err(text)?;
    let told = |e: ftcore::Error| {
        let words = format!("told to panic in {place}");
        ensure!(
            e.kind() == ErrorKind::Internal && e.to_string().contains(&words),
            "{e:?}"
        );
        Ok(())
    };
    let made = make(&panics, place);
    if place == "create" {
        return told(made.err().ok_or("it was made")?);
    }
    let group = made.map_err(text)?;
    if place == "configure" {
        told(alone(&*group, 1).err().ok_or("it was configured")?)?;
    } else if !matches!(place, "info" | "capabilities") {
        alone(&*group, 1).map_err(text)?;
    }
    match place {
        "submit" => told(sums(&*group).err().ok_or("it worked")?)?,
        "execute" => {
            let tensors = vec![Tensor::from_vec(vec![1.5f32])];
            let op = Collective::AllReduce {
                tensors,
                op: ReduceOp::Sum,
            };
            let failed = group
                .run_blocking(op, SubmitOptions::by(soon()))
                .err()
                .ok_or("it worked")?;
            ensure!(failed.tensors.len() == 1, "the tensor did not come back");
            told(failed.error)?;
        }
        "split" => told(group.split(Some(0), 0, soon()).err().ok_or("it was split")?)?,
        "shutdown" => told(group.shutdown(soon()).err().ok_or("it was shut down")?)?,
        "abort" => group.abort("test"),
        "traffic" => ensure!(
            group.traffic() == ftcore::Traffic::default(),
            "{:?}",
            group.traffic()
        ),
        "error" => {
            // The question itself kills the group; the second answer is its death.
            let _ = group.error();
        }
        _ => {}
    }
    if place == "drop" {
        drop(group);
    } else {
        // Dead, says why, and stays so.
        let words = format!("told to panic in {place}");
        let cause = group.error().ok_or("it has no error")?;
        // What failed first is the abort itself.
        ensure!(place == "abort" || cause.to_string().contains(&words), "{cause}");
        let again = alone(&*group, 2).err().ok_or("it lives on")?;
        ensure!(
            again.kind() == ErrorKind::Poisoned && again.to_string().contains(&words),
            "{again:?}"
        );
        group.abort("dead groups can be aborted");
        drop(group);
    }
    // The neighbour does not notice, and the process lives.
    let sum = sums(&*healthy).map_err(text)?;
    ensure!(sum.as_slice::<f32>().map_err(text)? == [1.5], "{sum:?}");
    Ok(())
}

fn unusable() -> Outcome {
    let unusable = backend(&odd()?, "unusable")?;
    let e = unusable.factory.probe().err().ok_or("it can be used")?;
    let wanted = Unavailable::VersionTooOld {
        what: "libodd.so".into(),
        found: "1.2".into(),
        needed: "2.0".into(),
    };
    ensure!(Unavailable::of(&e) == Some(&wanted), "{e:?}");
    let library = unusable.factory.library();
    ensure!(
        library.as_deref() == Some("libodd 1.2 from /opt/odd"),
        "{library:?}"
    );
    ensure!(
        backend(&odd()?, "panics")?.factory.library().is_none(),
        "gloo has no library"
    );
    Ok(())
}

fn toy_kind() -> DeviceKind {
    DeviceKind::Named("toy".into())
}

fn registered() -> Outcome<Backend> {
    let odd = odd()?;
    odd.register(&Registry::new(), OnConflict::Keep).map_err(text)?;
    backend(&odd, "toy")
}

fn device() -> Outcome {
    registered()?;
    let toys = accelerator(&toy_kind()).map_err(text)?;
    ensure!(
        toys.count() == 2 && toys.name(1).map_err(text)? == "toy device 1",
        "{}",
        toys.count()
    );
    ensure!(!toys.native_fp8(0) && toys.native_fp8(1), "FP8");
    toys.set(1).map_err(text)?;
    ensure!(toys.current().map_err(text)? == 1, "current");
    let none = toys.set(9).err().ok_or("toy:9 exists")?;
    ensure!(
        none.kind() == ErrorKind::Backend && none.code() == Some(101),
        "{none:?}"
    );
    let stream = toys.new_stream(1, true).map_err(text)?;
    ensure!(
        stream.device() == Device::new(toy_kind(), 1),
        "{}",
        stream.device()
    );
    let mut tensor = toys.alloc(1, DType::I16, &[2, 2]).map_err(text)?;
    ensure!(
        tensor.shape() == [2, 2] && tensor.device().index == 1,
        "{tensor:?}"
    );
    let bytes = [1u8, 0, 2, 0, 3, 0, 4, 0];
    toys.copy_in(&bytes, &mut tensor, &*stream).map_err(text)?;
    let mut back = [0u8; 8];
    toys.copy_out(&tensor, &mut back, &*stream).map_err(text)?;
    ensure!(back == bytes, "{back:?}");
    let short = toys
        .copy_out(&tensor, &mut back[..3], &*stream)
        .err()
        .map(|e| e.kind());
    ensure!(short == Some(ErrorKind::InvalidArgument), "{short:?}");
    let foreign = toys
        .copy_out(&tensor, &mut back, &ftcore::CpuStream)
        .err()
        .map(|e| e.kind());
    ensure!(foreign == Some(ErrorKind::InvalidArgument), "{foreign:?}");
    let event = stream.record().map_err(text)?;
    let other = toys.current_stream(1).map_err(text)?;
    other.wait(&*event).map_err(text)?;
    ensure!(
        event.query().map_err(text)?,
        "the stream has waited for the event"
    );
    event.synchronize(soon()).map_err(text)?;
    let late = stream
        .record()
        .map_err(text)?
        .synchronize(deadline_in(Duration::ZERO));
    ensure!(
        late.err().map(|e| e.kind()) == Some(ErrorKind::Timeout),
        "a deadline in the past"
    );
    toys.synchronize(1, soon()).map_err(text)
}

fn toy() -> Outcome {
    let toy = registered()?;
    let device = Device::new(toy_kind(), 0);
    let results = with_ranks(&toy, &device, 2, |rank, group, _| {
        let toys = accelerator(&toy_kind()).map_err(text)?;
        let stream = toys.new_stream(0, false).map_err(text)?;
        let mut tensor = toys.alloc(0, DType::F32, &[3]).map_err(text)?;
        let mine: Vec<u8> = [1.0f32, 2.0, 3.0]
            .iter()
            .flat_map(|x| (x * (rank + 1) as f32).to_le_bytes())
            .collect();
        toys.copy_in(&mine, &mut tensor, &*stream).map_err(text)?;
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(soon())
        };
        let tensors = vec![tensor];
        let op = Collective::AllReduce {
            tensors,
            op: ReduceOp::Sum,
        };
        let work = group.run(op, options).map_err(text)?;
        // Recorded long before it is done: the stream waits, not the caller's `take`.
        work.wait_on(&*stream).map_err(text)?;
        let tensor = work.take_tensor().map_err(text)?;
        let mut back = [0u8; 12];
        toys.copy_out(&tensor, &mut back, &*stream).map_err(text)?;
        let sums: Vec<f32> = back
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        let host = group
            .all_reduce(Tensor::from_vec(vec![1.0f32]), ReduceOp::Sum)
            .err()
            .map(|r| r.error.kind());
        ensure!(
            host == Some(ErrorKind::InvalidArgument),
            "{host:?} for host memory"
        );
        group.barrier().map_err(text)?;
        Ok(sums)
    })?;
    ensure!(results.iter().all(|r| *r == [3.0, 6.0, 9.0]), "{results:?}");
    let foreign = with_ranks(&toy, &device, 1, |_, group, _| {
        let toys = accelerator(&toy_kind()).map_err(text)?;
        let tensors = vec![toys.alloc(0, DType::F32, &[1]).map_err(text)?];
        struct Elsewhere;
        impl ftcore::Stream for Elsewhere {
            fn device(&self) -> Device {
                Device::new(toy_kind(), 0)
            }
            fn record(&self) -> ftcore::Result<std::sync::Arc<dyn ftcore::Event>> {
                Ok(std::sync::Arc::new(ftcore::ReachedEvent))
            }
            fn wait(&self, _: &dyn ftcore::Event) -> ftcore::Result<()> {
                Ok(())
            }
            fn query(&self) -> ftcore::Result<bool> {
                Ok(true)
            }
            fn synchronize(&self, _: std::time::Instant) -> ftcore::Result<()> {
                Ok(())
            }
        }
        let options = SubmitOptions {
            stream: Some(std::sync::Arc::new(Elsewhere)),
            ..SubmitOptions::by(soon())
        };
        let op = Collective::AllReduce {
            tensors,
            op: ReduceOp::Sum,
        };
        let refused = group.run(op, options).err().ok_or("a foreign stream was taken")?;
        ensure!(
            refused.op.into_tensors().len() == 1,
            "the tensor did not come back"
        );
        Ok(refused.error.kind())
    })?;
    ensure!(foreign == [ErrorKind::Unsupported], "{foreign:?}");
    Ok(())
}

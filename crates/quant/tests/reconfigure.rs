//! `configure` of the quantised group while other things happen: an abort that comes early, failures that come late.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use crate::ranks::{configuration, soon, store};
use ftcore::{
    Capabilities, Checked, Collective, Completer, Completion, Configuration, DType, DTypeSet, Device, Epoch,
    Error, ErrorKind, Failed, Feature, FeatureSet, GroupInfo, OpKind, OpSet, ProcessGroup, ProcessGroupExt,
    ReduceOp, Rejected, Result, SubmitOptions, Tensor, Traffic, Work, deadline_in, execute_by_submit,
    time_left, work_pair,
};
use oxccl_quant::{Codec, QuantizedGroup};

/// What is done when the group below begins to be configured.
type Before = Box<dyn FnOnce(&Below) + Send>;

/// A group of two whose peer never comes to an operation; what is submitted ends when a test says so.
#[derive(Default)]
struct State {
    pending: Vec<(Completer, Vec<Tensor>)>,
    before: Option<Before>,
    /// Whether the peer comes to be configured.
    alone: bool,
}

struct Below {
    capabilities: Capabilities,
    state: Mutex<State>,
}

impl Below {
    fn new() -> Arc<Self> {
        let all = DTypeSet::of(&DType::ALL);
        let capabilities = Capabilities {
            ops: OpSet::of(&OpKind::ALL),
            moves: all,
            reduces: [all; ReduceOp::COUNT],
            features: FeatureSet::of(&[Feature::Abort, Feature::Reconfigure]),
            options: Vec::new(),
            devices: vec!["cpu".into()],
            notes: Vec::new(),
        };
        let state = Mutex::default();
        Arc::new(Self { capabilities, state })
    }

    /// Fails what was submitted so far, the last first.
    fn fail_all(&self, kind: ErrorKind, text: &str) {
        let pending = std::mem::take(&mut self.state.lock().unwrap().pending);
        for (completer, tensors) in pending {
            completer.fail(Error::new(kind, text.to_string()).with_peer(1), tensors);
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl ProcessGroup for Below {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            backend: "fake".into(),
            name: "below".into(),
            rank: 0,
            world_size: 2,
            epoch: Epoch(1),
            device: Device::CPU,
            dropped_options: Vec::new(),
        }
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn configure(&self, c: Configuration) -> Result<()> {
        let before = self.state.lock().unwrap().before.take();
        if let Some(before) = before {
            before(self);
        }
        // As every rank does. The other one quantises in the same way.
        let prefix = format!("{}/quant/{}/format", c.prefix, c.epoch);
        let own = c.store.get(&format!("{prefix}/0"), c.deadline)?;
        c.store.set(&format!("{prefix}/1"), &own, c.deadline)?;
        while self.state.lock().unwrap().alone {
            c.cancel.check()?;
            if time_left(c.deadline).is_zero() {
                return Err(Error::timeout("rank 1 did not come"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
    fn submit(&self, op: Checked, _: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        let (work, completer) = work_pair(op.kind(), soon(), |_| {});
        let mut state = self.state.lock().unwrap();
        state.pending.push((completer, op.into_tensors()));
        Ok(work)
    }
    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }
    fn alloc(&self, dtype: DType, count: usize) -> Result<Tensor> {
        Ok(Tensor::zeros(dtype, count))
    }
    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Ok(None)
    }
    fn abort(&self, _: &str) {}
    fn error(&self) -> Option<Error> {
        None
    }
    fn shutdown(&self, _: Instant) -> Result<()> {
        Ok(())
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

fn over(below: &Arc<Below>) -> QuantizedGroup {
    QuantizedGroup::new(below.clone(), Codec::Int8B64, Duration::from_secs(20)).unwrap()
}

#[test]
fn l27_an_abort_before_the_group_below_connects_ends_a_configuration_that_waits_for_a_peer() {
    let below = Below::new();
    let group = Arc::new(over(&below));
    let aborting: Weak<QuantizedGroup> = Arc::downgrade(&group);
    {
        let mut state = below.state.lock().unwrap();
        state.alone = true;
        state.before = Some(Box::new(move |_| aborting.upgrade().unwrap().abort("enough")));
    }
    let began = Instant::now();
    let e = group.configure(configuration(&store(), 1, 0, 2)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // It belongs to that attempt.
    below.state.lock().unwrap().alone = false;
    group.configure(configuration(&store(), 2, 0, 2)).unwrap();
    assert!(group.error().is_none());
}

#[test]
fn l27_an_abort_while_the_work_of_the_last_epoch_ends_is_not_forgotten() {
    let below = Below::new();
    let group = over(&below);
    group.configure(configuration(&store(), 1, 0, 2)).unwrap();
    // Quantised: the thread is in it until it ends, and `configure` waits for that.
    let sum = group
        .all_reduce(Tensor::from_vec(vec![1f32; 10]), ReduceOp::Sum)
        .unwrap();
    let until = soon();
    while below.state.lock().unwrap().pending.is_empty() {
        assert!(!time_left(until).is_zero(), "the thread is not in the operation");
        std::thread::yield_now();
    }
    std::thread::scope(|scope| {
        let configuring = scope.spawn(|| group.configure(configuration(&store(), 2, 0, 2)));
        while group.info().world_size != 0 {
            assert!(!time_left(until).is_zero(), "it is not being configured");
            std::thread::yield_now();
        }
        group.abort("enough");
        below.fail_all(ErrorKind::Aborted, "configured again");
        let e = configuring.join().unwrap().unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
    });
    assert!(sum.wait(soon()).is_err());
}

#[test]
fn l30_a_mismatch_of_the_last_epoch_that_is_named_late_is_none_of_the_next() {
    let below = Below::new();
    let group = over(&below);
    group.configure(configuration(&store(), 1, 0, 2)).unwrap();
    // Forwarded as they are.
    let works = [0, 1].map(|root| group.broadcast(Tensor::from_vec(vec![1i32]), root).unwrap());
    let until = soon();
    while below.state.lock().unwrap().pending.len() < works.len() {
        assert!(!time_left(until).is_zero(), "the operations do not get there");
        std::thread::yield_now();
    }
    // Rank 1 never says what it called: that is still asked for when the next epoch begins.
    below.fail_all(ErrorKind::Mismatch, "a rank called something else");
    group.configure(configuration(&store(), 2, 0, 2)).unwrap();
    for work in &works {
        let e = work.wait(deadline_in(Duration::from_secs(10))).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted, "{e}");
        assert_eq!(work.recover().len(), 1, "the tensors are free");
    }
    assert!(group.error().is_none(), "{:?}", group.error());
    let op = Collective::Barrier;
    assert!(group.run(op, SubmitOptions::default()).is_ok());
}

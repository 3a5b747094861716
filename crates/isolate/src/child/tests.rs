//! The groups of a child, in this process, with the test at the parent's end of the sockets.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Checked, Collective, Completer, Completion, Configuration, DType, DTypeSet, Device, Epoch,
    Error, ErrorKind, Failed, FeatureSet, GroupInfo, OpKind, OpSet, ProcessGroup, ReduceOp, Rejected, Result,
    SubmitOptions, Tensor, Traffic, Work, Wrapper, deadline_in, work_pair,
};
use rustix::event::PollFlags;

use super::groups::{Groups, Ready, Reporter};
use crate::channel::{Filled, Receiver, pair, wait_for};
use crate::store::proxy::Line;
use crate::wire::frames::{Either, Order, Report, address, submit};
use crate::wire::op::{Place, put};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(20))
}

/// Finds out that it has failed when it is asked, and tells of its operations' ends there and then, as a plugin's group may.
struct Asked {
    capabilities: Capabilities,
    epoch: AtomicU64,
    pending: Mutex<Vec<Completer>>,
}

impl ProcessGroup for Asked {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            backend: "asked".into(),
            name: "asked".into(),
            rank: 0,
            world_size: 2,
            epoch: Epoch(self.epoch.load(Ordering::SeqCst)),
            device: Device::CPU,
            dropped_options: Vec::new(),
        }
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn configure(&self, configuration: Configuration) -> Result<()> {
        self.epoch.store(configuration.epoch.0, Ordering::SeqCst);
        Ok(())
    }
    fn submit(&self, op: Checked, _: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let (work, completer) = work_pair(op.get().kind(), soon(), |_| {});
        self.pending.lock().unwrap().push(completer);
        Ok(work)
    }
    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Ok(None)
    }
    fn abort(&self, _: &str) {}
    fn error(&self) -> Option<Error> {
        let pending = std::mem::take(&mut *self.pending.lock().unwrap());
        if pending.is_empty() {
            return None;
        }
        let error = Error::new(ErrorKind::PeerLost, "peer 1 is gone").with_peer(1);
        for completer in pending {
            completer.fail(error.clone(), Vec::new());
        }
        Some(error)
    }
    fn shutdown(&self, _: Instant) -> Result<()> {
        Ok(())
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

/// Refuses what it is to carry out, and keeps its memory.
struct Keeps(Asked);

impl Wrapper for Keeps {
    fn inner(&self) -> &dyn ProcessGroup {
        &self.0
    }
    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        self.0.submit(op, options)
    }
    fn execute(&self, op: Checked, _: SubmitOptions) -> Result<Completion, Box<Failed>> {
        std::mem::forget(op);
        let (error, tensors) = (Error::invalid("not now"), Vec::new());
        Err(Box::new(Failed { error, tensors }))
    }
    fn split(&self, color: Option<u32>, key: u32, by: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        self.0.split(color, key, by)
    }
}

/// The next report but that of the group's failure, which may come before or after those of its operations; fails if there is none within 20 s.
fn report(receiver: &mut Receiver) -> Report {
    loop {
        if let Some(body) = receiver.next().unwrap() {
            match Report::decode(body).unwrap() {
                Report::Failed { .. } => continue,
                report => return report,
            }
        }
        assert!(
            wait_for(receiver.fd(), PollFlags::IN, soon()).unwrap(),
            "the child says nothing"
        );
        assert!(receiver.fill(false).unwrap() != Filled::Closed);
    }
}

/// The order of an operation, without the length that comes first.
fn order(id: u64, op: &Collective, places: &[Place]) -> Vec<u8> {
    let mut frame = submit(0, true, soon(), None);
    put(&mut frame, op, &mut places.iter().copied()).unwrap();
    let mut frame = frame.finish().unwrap();
    address(&mut frame, id, false);
    frame.split_off(4)
}

/// What an order says of an operation on these groups.
fn ready(groups: &Groups, order: &[u8]) -> Ready {
    let Either::Submission(submission) = Order::decode(order).unwrap() else {
        panic!("not a submission");
    };
    groups.check(submission).unwrap().unwrap()
}

fn asked() -> Asked {
    Asked {
        capabilities: Capabilities {
            ops: OpSet::of(&[OpKind::Barrier, OpKind::AllReduce]),
            moves: DTypeSet::of(&[DType::U8]),
            reduces: [DTypeSet::of(&[DType::U8]); ReduceOp::COUNT],
            features: FeatureSet::NONE,
            options: Vec::new(),
            devices: vec!["cpu".into()],
            notes: Vec::new(),
        },
        epoch: AtomicU64::new(1),
        pending: Mutex::default(),
    }
}

#[test]
fn memory_that_a_group_keeps_of_what_it_refuses_is_not_told_as_free() {
    let (parents, childs): (OwnedFd, OwnedFd) = pair().unwrap();
    let (_express, childs_express) = pair().unwrap();
    let (_stores, childs_stores) = pair().unwrap();
    let reporter = Arc::new(Reporter::new(Arc::new(childs), childs_express));
    let line = Line::open(childs_stores).unwrap();
    let groups = Groups::new(reporter, line, Box::new(Keeps(asked())), None).unwrap();
    let op = Collective::AllReduce {
        tensors: vec![Tensor::zeros(DType::U8, 0)],
        op: ReduceOp::Sum,
    };
    let nothing = Place {
        segment: 0,
        offset: 0,
        dtype: DType::U8,
        count: 0,
    };
    let order = order(1, &op, &[nothing]);
    groups.execute(ready(&groups, &order));
    let Report::Done { done } = report(&mut Receiver::new(Arc::new(parents), false)) else {
        panic!("not the end of the operation");
    };
    assert_eq!((done.released, done.fatal), (false, false), "{:?}", done.result);
}

#[test]
fn a_group_that_tells_of_an_operation_while_it_is_asked_for_its_failure_holds_up_nothing() {
    let (parents, childs): (OwnedFd, OwnedFd) = pair().unwrap();
    let (_express, childs_express) = pair().unwrap();
    let (_stores, childs_stores) = pair().unwrap();
    let reporter = Arc::new(Reporter::new(Arc::new(childs), childs_express));
    let line = Line::open(childs_stores).unwrap();
    let groups = Groups::new(reporter, line, Box::new(asked()), None).unwrap();
    let mut receiver = Receiver::new(Arc::new(parents), false);
    // Twice: the thread that looks for failures goes on, and so does `configure`.
    for id in [1, 2] {
        groups.submit(ready(&groups, &order(id, &Collective::Barrier, &[])));
        let Report::Done { done } = report(&mut receiver) else {
            panic!("not the end of the operation");
        };
        let error = done.result.unwrap_err();
        assert_eq!((done.id, error.kind()), (id, ErrorKind::PeerLost), "{error}");
        let again = Order::Configure {
            call: 7,
            group: 0,
            store: 0,
            prefix: "p".into(),
            name: "n".into(),
            epoch: Epoch(1 + id),
            rank: 0,
            world: 2,
            deadline: soon(),
        };
        groups.obey(again).unwrap();
        let answer = report(&mut receiver);
        assert!(
            matches!(
                answer,
                Report::Answer {
                    call: 7,
                    result: Ok(_)
                }
            ),
            "{answer:?}"
        );
    }
}

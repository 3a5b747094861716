//! Isolated groups: what parent and child tell each other over their sockets. Either may be of another build, or broken.

#[allow(dead_code, unused_imports, reason = "included for its readers")]
#[path = "../../crates/isolate/src/wire/mod.rs"]
mod wire;

use ftcore::{Collective, DType, Device, Epoch, Error, ErrorKind, GroupOptions, ReduceOp, Result, Tensor};
use wire::frames::{Carry, Done, Either, Greeting, Order, Report, Settled, address, submit};
use wire::op::Place;
use wire::{MAX_FRAME, Writer};

/// As a child reads an order and a parent a report: refused with `Protocol`, or it means the same after it was written and read again.
pub fn frames(data: &[u8]) {
    match Order::decode(data) {
        Ok(Either::Order(order)) => {
            let once = order.encode().expect("what was read is short enough");
            let Ok(Either::Order(again)) = Order::decode(&once[4..]) else {
                panic!("{order:?} is not read back");
            };
            assert_eq!(kept(&again), kept(&order));
        }
        Ok(Either::Submission(submission)) => operation(submission.op),
        Err(e) => refused(&e),
    }
    match Report::decode(data) {
        Ok(report) => {
            let once = report.encode().expect("what was read is short enough");
            let again = Report::decode(&once[4..]).expect("what was written is read");
            assert_eq!(again.encode().expect("short enough"), once, "{report:?}");
        }
        Err(e) => refused(&e),
    }
}

fn refused(e: &Error) {
    // An unknown device is the one mistake that another part names.
    let kinds = [ErrorKind::Protocol, ErrorKind::InvalidArgument];
    assert!(kinds.contains(&e.kind()), "{e}");
}

/// An order without its deadline, which moves on while it travels.
fn kept(order: &Order) -> String {
    let text = format!("{order:?}");
    text.split("deadline").next().unwrap_or_default().to_string()
}

/// What a submission says is to be done, with tensors of at most a few KiB.
fn operation(mut r: wire::Reader<'_>) {
    let mut places = Vec::new();
    let read = wire::op::get(&mut r, &mut |place: Place| {
        if place.count > 1 << 10 || places.len() > 1 << 10 {
            return Err(Error::new(ErrorKind::Protocol, "outside of every segment"));
        }
        places.push(place);
        Ok(Tensor::zeros(
            place.dtype,
            usize::try_from(place.count).unwrap_or(0),
        ))
    });
    match read {
        Ok(op) => {
            assert_eq!(op.tensors().len(), places.len(), "{op:?}");
            let bytes = written(&op, &places);
            let mut again = Vec::new();
            let mut r = wire::Reader::new(&bytes);
            let same = wire::op::get(&mut r, &mut |place: Place| {
                again.push(place);
                Ok(Tensor::zeros(
                    place.dtype,
                    usize::try_from(place.count).unwrap_or(0),
                ))
            });
            let same = same.expect("what was written is read");
            r.end().expect("and nothing more");
            assert_eq!((same.kind(), &again), (op.kind(), &places));
            assert_eq!(written(&same, &again), bytes);
        }
        Err(e) => refused(&e),
    }
}

fn written(op: &Collective, places: &[Place]) -> Vec<u8> {
    let mut w = Writer::new(0);
    wire::op::put(&mut w, op, &mut places.iter().copied()).expect("an operation that was read");
    // Behind the length and the tag.
    w.finish().expect("short enough")[5..].to_vec()
}

/// Valid bytes: one order and one report of each kind, and a submission of several operations.
pub fn seeds() -> Vec<Vec<u8>> {
    let deadline = ftcore::deadline_in(std::time::Duration::from_secs(3));
    let text = || "prefix/é".to_string();
    let mut options = GroupOptions::default();
    options.hints.insert("name".to_string(), "value".to_string());
    let orders = [
        Order::Hello {
            greeting: Greeting,
            backend: "gloo".to_string(),
            device: Device::CPU,
            options,
            carry: Carry::Device(vec![7; 64]),
        },
        Order::Segment { id: 1, bytes: 4096 },
        Order::DeviceSegment {
            id: 2,
            bytes: 4096,
            handle: vec![3; 64],
        },
        Order::Forget { id: 1 },
        Order::Configure {
            call: 1,
            group: 0,
            store: 5,
            prefix: text(),
            name: text(),
            epoch: Epoch(9),
            rank: 1,
            world: 4,
            deadline,
        },
        Order::Split {
            call: 2,
            group: 0,
            new: 1,
            color: Some(3),
            key: 1,
            deadline,
        },
        Order::Abort {
            group: 0,
            reason: text(),
        },
        Order::Shutdown {
            call: 3,
            group: 0,
            deadline,
        },
        Order::Release { group: 0 },
        Order::End { reason: text() },
        Order::Leave,
    ];
    let error = Error::new(ErrorKind::PeerLost, "closed its connection")
        .with_op("all_reduce")
        .with_rank(1)
        .with_peer(2)
        .with_peer_address("10.0.0.2:5000".to_string())
        .with_epoch(Epoch(3))
        .with_seq(4)
        .with_data(DType::F32, 5)
        .with_code(6)
        .with_source(Error::new(ErrorKind::Backend, "the cause"));
    let settled = Settled {
        name: text(),
        rank: 1,
        world: 2,
        epoch: Epoch(3),
        sent: 4,
        received: 5,
    };
    let done = |result| {
        let done = Done {
            id: 7,
            group: 0,
            released: true,
            fatal: true,
            result,
            sent: 1,
            received: 2,
        };
        Report::Done { done }
    };
    let reports = [
        Report::Refused { error: error.clone() },
        Report::Answer {
            call: 1,
            result: Ok(Some(settled)),
        },
        done(Ok((Some(3), 2))),
        done(Err(error.clone())),
        Report::Failed {
            group: 0,
            epoch: Epoch(3),
            error: error.clone(),
        },
    ];
    let t = |n| Tensor::zeros(DType::F32, n);
    let operations = [
        Collective::AllReduce {
            tensors: vec![t(3), t(0)],
            op: ReduceOp::PremulSum(0.5),
        },
        Collective::AllToAllInto {
            input: t(6),
            output: t(6),
            input_splits: vec![2, 4],
            output_splits: vec![4, 2],
        },
        Collective::Batch {
            ops: vec![
                Collective::Send {
                    tensor: t(2),
                    peer: 1,
                    tag: 5,
                },
                Collective::Recv {
                    tensor: t(2),
                    peer: None,
                    tag: 5,
                },
            ],
        },
        Collective::Barrier,
    ];
    let submission = |op: &Collective| {
        let places = op.tensors().into_iter().map(|t| Place {
            segment: 1,
            offset: 64,
            dtype: t.dtype(),
            count: t.count() as u64,
        });
        let mut w = submit(0, true, deadline, Some(vec![9; 8]));
        wire::op::put(&mut w, op, &mut places.into_iter())?;
        let mut frame = w.finish()?;
        address(&mut frame, 17, false);
        Ok(frame)
    };
    let frames: Result<Vec<Vec<u8>>> = orders
        .iter()
        .map(Order::encode)
        .chain(reports.iter().map(Report::encode))
        .chain(operations.iter().map(submission))
        .collect();
    let frames = frames.expect("frames of this size can be written");
    assert!(frames.iter().all(|f| f.len() < MAX_FRAME));
    // Without the lengths, which the sockets' reader takes off.
    frames.into_iter().map(|f| f[4..].to_vec()).collect()
}

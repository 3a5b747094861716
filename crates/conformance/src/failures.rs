//! Ranks that die, hang, abort or belong to another epoch: the others learn it at once, by name, and go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ftcore::{
    Cancel, Collective, Configuration, DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt,
    ReduceOp, Status, SubmitOptions, Tensor, deadline_in,
};

use crate::case::{Case, Worlds, eventually};
use crate::expected;
use crate::messages::{tag_of, victims};
use crate::probe::{Probe, moved};
use crate::{Failure, Needs, Outcome, Rank};

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let abort = Needs::Feature(Feature::Abort);
    let again = Needs::Feature(Feature::Reconfigure);
    let reduce = Needs::Sum;
    let recv = Needs::Op(OpKind::Recv);
    let mut all = vec![
        Case::new(
            "failures::l27_a_configure_that_is_cancelled_or_aborted_ends_with_the_reason",
            2,
            &[],
            cancelled,
        ),
        Case::new(
            "failures::l27_an_operation_that_is_aborted_ends_with_the_reason",
            2,
            &[abort, recv],
            operation_aborted,
        ),
    ];
    for &world in worlds.or(&[2, 3, 4]) {
        all.extend([
            Case::new(
                "failures::l27_abort_from_another_thread_ends_work_on_all_ranks",
                world,
                &[abort, reduce, recv],
                aborted,
            ),
            Case::new(
                "failures::l27_a_dropped_group_ends_the_work_of_the_others",
                world,
                &[abort, reduce, recv],
                dropped,
            ),
            Case::new(
                "failures::l32_poisoned_with_the_first_cause",
                world,
                &[abort, reduce],
                poisoned,
            ),
            Case::new(
                "failures::l35_timeout_names_who_is_missing",
                world,
                &[abort, reduce],
                timed_out,
            ),
            Case::new(
                "failures::l35_timeout_though_no_thread_waits",
                world,
                &[abort, reduce],
                unattended,
            ),
            Case::new(
                "failures::l35_timeout_of_a_receive",
                world,
                &[abort, recv],
                |rank| receive_timed_out(rank, true),
            ),
            Case::new(
                "failures::l35_timeout_of_a_receive_though_no_thread_waits",
                world,
                &[abort, recv],
                |rank| receive_timed_out(rank, false),
            ),
            Case::new(
                "failures::l30_an_old_deadline_spares_the_next_epoch",
                world,
                &[abort, again, recv],
                old_deadline,
            ),
            Case::new(
                "failures::reconfigure_many_times",
                world,
                &[again, reduce],
                reconfigure,
            ),
            Case::new(
                "failures::reconfigure_after_abort_with_work_in_flight",
                world,
                &[abort, again, reduce],
                in_flight,
            ),
            Case::new("failures::stale_epoch_is_refused", world, &[again, reduce], stale),
            Case::new(
                "failures::l33_missing_rank_is_named_at_configure",
                world,
                &[],
                missing,
            ),
        ]);
        let dies = [Needs::RealProcesses, abort, again, reduce];
        all.extend(victims(world).into_iter().map(|victim| {
            let name = match victim {
                0 => "failures::killed_rank_0_is_named_and_the_others_go_on",
                _ => "failures::killed_process_is_named_and_the_others_go_on",
            };
            Case::new(name, world, &dies, move |rank| killed(rank, victim)).killing(victim)
        }));
    }
    all
}

/// A sum on rank `own` of `world`.
fn sum_of(own: u32, group: &dyn ProcessGroup, world: u32) -> Outcome {
    let probe = Probe::of(group, DType::I64);
    let values = (own as i32 + 1, (world * (world + 1) / 2) as i32);
    [7usize, 50_000]
        .into_iter()
        .try_for_each(|count| probe.sum(group, "the sum", values, count))
}

/// A large all-reduce that some other rank does not take part in.
fn submit_large(group: &dyn ProcessGroup, by: Instant) -> Outcome<Option<ftcore::Work>> {
    let op = Collective::AllReduce {
        tensors: vec![Probe::of(group, DType::F32).tensor(0, 200_000)],
        op: ReduceOp::Sum,
    };
    match group.run(op, SubmitOptions::by(by)) {
        Ok(work) => Ok(Some(work)),
        // The notice may be faster than the call.
        Err(rejected) if rejected.error.kind() == ErrorKind::Poisoned => Ok(None),
        Err(rejected) => Err(rejected.into()),
    }
}

/// The error of work that must fail, or of the group if it was refused already.
fn failure_of(rank: &Rank, group: &dyn ProcessGroup, work: Option<ftcore::Work>) -> Outcome<ftcore::Error> {
    match work {
        Some(work) => match work.wait(rank.soon()) {
            Err(e) => {
                ensure!(
                    work.recover().len() == 1,
                    "the tensor did not come back after the failure"
                );
                Ok(e)
            }
            Ok(()) => Err(Failure::new("work succeeded that could not")),
        },
        None => group
            .error()
            .ok_or_else(|| Failure::new("a poisoned group has no error")),
    }
}

fn aborted(rank: &Rank) -> Outcome {
    abort_by_rank_0(rank, rank.group()?.as_ref())
}

/// Rank 0 aborts `group`, with work pending on every rank; all hear why.
pub(crate) fn abort_by_rank_0(rank: &Rank, group: &dyn ProcessGroup) -> Outcome {
    if rank.rank != 0 {
        let work = submit_large(group, rank.soon())?;
        rank.meet("submitted")?;
        let e = failure_of(rank, group, work)?;
        return expected::ABORTED_ELSEWHERE.check(&e, &[("REASON", "enough"), ("N", "0")]);
    }
    // A receive without a send: only the abort ends it.
    let op = Collective::Recv {
        tensor: Tensor::zeros(moved(group.capabilities()), 1),
        peer: Some(1),
        tag: tag_of(group, 99),
    };
    let work = group.run(op, SubmitOptions::by(rank.soon()))?;
    rank.meet("submitted")?;
    let began = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| group.abort("enough"));
    });
    let Err(e) = work.wait(rank.soon()) else {
        return Err(Failure::new("a receive without a sender succeeded"));
    };
    // INV-2 says 100 ms; the margin is for a machine that is busy with other tests.
    expected::AFTER_ABORT.check(began)?;
    expected::ABORTED_HERE.check(&e, &[("REASON", "enough")])
}

/// Whether the operation ends alone or its group with it is the backend's.
fn operation_aborted(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // No rank ends it while another still connects.
    rank.meet("configured")?;
    let abort = || {
        let into = Tensor::zeros(moved(group.capabilities()), 1);
        let work = group.recv(into, 1, tag_of(group.as_ref(), 99))?;
        let began = Instant::now();
        work.abort("enough");
        let Err(e) = work.wait(rank.soon()) else {
            return Err(Failure::new("a receive without a sender succeeded"));
        };
        expected::ABORTED_HERE.check(&e, &[("REASON", "enough")])?;
        expected::AFTER_ABORT.check(began)
    };
    let aborted = if rank.rank == 0 { abort() } else { Ok(()) };
    rank.meet("ended")?;
    aborted
}

fn dropped(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let last = rank.world - 1;
    let work = submit_large(group.as_ref(), rank.soon()).map(|w| if rank.rank == last { None } else { w });
    if rank.rank == last {
        // All ranks are in the operation; one vanishes with work pending.
        let tag = tag_of(group.as_ref(), 42);
        let pending = group.recv(Tensor::zeros(moved(group.capabilities()), 1), 0, tag)?;
        rank.meet("submitted")?;
        drop(group);
        let Err(e) = pending.wait(rank.soon()) else {
            return Err(Failure::new("a receive without a sender succeeded"));
        };
        ensure!(
            e.kind() == ErrorKind::Aborted,
            "the dropped group's own work: {e}"
        );
        return Ok(());
    }
    rank.meet("submitted")?;
    // The all-reduce may have come through before the drop; then the next operation cannot.
    let first = match work? {
        Some(work) => work.wait(rank.soon()).err(),
        None => group.error(),
    };
    let e = match first {
        Some(e) => e,
        None => {
            let work = submit_large(group.as_ref(), rank.soon())?;
            failure_of(rank, group.as_ref(), work)?
        }
    };
    ensure!(
        matches!(e.kind(), ErrorKind::Aborted | ErrorKind::PeerLost),
        "rank {}: {:?}: {e}",
        rank.rank,
        e.kind()
    );
    // Every rank ends in this case, one after the other. Who is blamed is the first one that went.
    ensure!(
        e.context().peer == Some(last) || e.to_string().contains(&format!("rank {last}")),
        "the error does not name rank {last}: {e}"
    );
    Ok(())
}

fn poisoned(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // No rank ends it while another still connects.
    rank.meet("configured")?;
    if rank.rank == 0 {
        group.abort("the first cause");
    }
    eventually("the notice of the abort", || group.error())?;
    let probe = Probe::of(group.as_ref(), DType::F32);
    for _ in 0..3 {
        let op = Collective::AllReduce {
            tensors: vec![probe.tensor(7, 2)],
            op: ReduceOp::Sum,
        };
        let Err(rejected) = group.run(op, SubmitOptions::default()) else {
            return Err(Failure::new("a poisoned group accepted work"));
        };
        expected::POISONED.check(&rejected.error, &[("CAUSE", "the first cause")])?;
        let back = rejected.op.into_tensors();
        ensure!(
            back.first()
                .is_some_and(|t| probe.check("what came back", t, 7, 2).is_ok()),
            "the tensor did not come back"
        );
    }
    // An abort on top changes nothing.
    group.abort("a second cause");
    let e = group.error().ok_or_else(|| Failure::new("the error is gone"))?;
    ensure!(
        e.to_string().contains("the first cause"),
        "the first cause was replaced: {e}"
    );
    // A process that ends right after its abort may not get to tell the others.
    rank.meet("heard")
}

/// Until a deadline that is to pass. Long enough that also a busy host has begun the operation by then: before that, an error says what it waited for
/// instead of who is missing.
const SHORT: Duration = Duration::from_secs(1);

/// Fails if what began then has failed long before its deadline. A tenth is for clocks that count in whole ticks.
fn took_its_time(began: Instant) -> Outcome {
    let took = began.elapsed();
    ensure!(
        took >= SHORT * 9 / 10,
        "its deadline was {SHORT:?} away, and it failed after {took:?}"
    );
    Ok(())
}

fn timed_out(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // Before any rank has begun: the first deadline of all ends the operation.
    let before = Instant::now();
    // No rank ends it while another still connects.
    rank.meet("configured")?;
    let last = rank.world - 1;
    if rank.rank == last {
        let e = eventually("the notice of the time-out", || group.error())?;
        ensure!(e.kind() == ErrorKind::Timeout, "the absent rank hears {e}");
        return Ok(());
    }
    let began = Instant::now();
    let work = submit_large(group.as_ref(), deadline_in(SHORT))?;
    let e = failure_of(rank, group.as_ref(), work)?;
    expected::DEADLINE.check(&e, &[])?;
    took_its_time(before)?;
    expected::AFTER_DEADLINE.check(began)
}

/// A short operation with an early deadline, behind others that had time: its rank's threads do something else.
fn unattended(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let probe = Probe::of(group.as_ref(), DType::I32);
    for _ in 0..3 {
        probe.sum(group.as_ref(), "the sum", (1, rank.world as i32), 3)?;
    }
    rank.meet("summed")?;
    if rank.rank == rank.world - 1 {
        let e = eventually("the notice of the time-out", || group.error())?;
        ensure!(e.kind() == ErrorKind::Timeout, "the absent rank hears {e}");
        return Ok(());
    }
    let op = Collective::AllReduce {
        tensors: vec![probe.tensor(1, 3)],
        op: ReduceOp::Sum,
    };
    let work = match group.run(op, SubmitOptions::by(deadline_in(SHORT))) {
        Ok(work) => work,
        // Another rank's deadline was earlier.
        Err(rejected) if rejected.error.kind() == ErrorKind::Poisoned => return Ok(()),
        Err(rejected) => return Err(rejected.into()),
    };
    expected::DEADLINE.check(&failure_of_unattended(&work)?, &[])
}

fn failure_of_unattended(work: &ftcore::Work) -> Outcome<ftcore::Error> {
    let failed = || match work.status() {
        Status::Failed(e) => Some(e),
        Status::Pending | Status::Succeeded => None,
    };
    eventually("the failure of an operation that no thread waits for", failed)
}

fn receive_timed_out(rank: &Rank, waits: bool) -> Outcome {
    let group = rank.group()?;
    // No rank ends it while another still connects.
    rank.meet("configured")?;
    if rank.rank != 0 {
        let e = eventually("the notice of the time-out", || group.error())?;
        ensure!(e.kind() == ErrorKind::Timeout, "rank {} hears {e}", rank.rank);
        return Ok(());
    }
    let tag = tag_of(group.as_ref(), 17);
    let op = Collective::Recv {
        tensor: Tensor::zeros(moved(group.capabilities()), 9),
        peer: Some(1),
        tag,
    };
    let began = Instant::now();
    let work = group.run(op, SubmitOptions::by(deadline_in(SHORT)))?;
    let e = match waits {
        true => failure_of(rank, group.as_ref(), Some(work))?,
        false => failure_of_unattended(&work)?,
    };
    took_its_time(began)?;
    expected::RECEIVE_DEADLINE.check(&e, &[("N", "1"), ("TAG", &tag.to_string())])
}

fn old_deadline(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // No rank's deadline ends it while another still connects.
    rank.meet("configured")?;
    let peer = (rank.rank + 1) % rank.world;
    let due = deadline_in(Duration::from_secs(1));
    let op = Collective::Recv {
        tensor: Tensor::zeros(moved(group.capabilities()), 1),
        peer: Some(peer),
        tag: tag_of(group.as_ref(), 1),
    };
    let work = group.run(op, SubmitOptions::by(due))?;
    rank.meet("pending")?;
    group.abort("on to the next epoch");
    ensure!(work.wait(rank.soon()).is_err(), "the receive succeeded");
    group.configure(rank.configuration("main", 2))?;
    eventually("the old deadline", || {
        (Instant::now() > due + Duration::from_millis(50)).then_some(())
    })?;
    rank.meet("later")?;
    ensure!(
        group.error().is_none(),
        "the old deadline hit the new epoch: {:?}",
        group.error()
    );
    sum_of(rank.rank, group.as_ref(), rank.world)
}

/// Every rank has another number in each epoch, and every third epoch is without rank 0: what a backend remembers of an earlier one is wrong.
fn reconfigure(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    for epoch in 1..=10u32 {
        let (own, world) = match (epoch % 3, rank.rank) {
            (0, 0) => continue,
            (0, own) => (own - 1, rank.world - 1),
            (_, own) => ((own + epoch) % rank.world, rank.world),
        };
        group.configure(Configuration {
            rank: own,
            world_size: world,
            ..rank.configuration("main", epoch.into())
        })?;
        let info = group.info();
        ensure!(
            (info.epoch.0, info.rank, info.world_size) == (epoch.into(), own, world),
            "after configure as rank {own} of {world}: {info:?}"
        );
        sum_of(own, group.as_ref(), world)?;
        let probe = Probe::of(group.as_ref(), DType::I64);
        let (number, last) = (probe.tensor(own as i32, 3), world - 1);
        let offered = group.capabilities();
        if offered.ops.contains(OpKind::Broadcast) && offered.moves.contains(number.dtype()) {
            let number = group.broadcast(number, last)?.take_tensor()?;
            probe.check("the number of the last rank", &number, last as i32, 3)?;
        }
    }
    Ok(())
}

/// INV-1: frames of an operation that was cut off never show up in the next epoch.
fn in_flight(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // No rank ends it while another still connects.
    rank.meet("configured")?;
    for epoch in 2..=6u64 {
        let works: Vec<_> = (0..3)
            .filter_map(|_| {
                let op = Collective::AllReduce {
                    tensors: vec![Probe::of(group.as_ref(), DType::F32).tensor(-1_000_000_000, 300_000)],
                    op: ReduceOp::Sum,
                };
                group.run(op, SubmitOptions::by(rank.soon())).ok()
            })
            .collect();
        if u64::from(rank.rank) == epoch % u64::from(rank.world) {
            group.abort("in the middle");
        }
        for work in works {
            // Some may have come through before the abort; all must end.
            if let Err(e) = work.wait(rank.soon()) {
                ensure!(
                    matches!(e.kind(), ErrorKind::Aborted | ErrorKind::PeerLost),
                    "rank {}: {:?}: {e}",
                    rank.rank,
                    e.kind()
                );
            }
        }
        group.configure(rank.configuration("main", epoch))?;
        sum_of(rank.rank, group.as_ref(), rank.world)?;
        // The next abort must not meet a rank that is still in this sum.
        rank.meet(&format!("epoch {epoch}"))?;
    }
    Ok(())
}

fn stale(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    group.configure(rank.configuration("main", 5))?;
    for epoch in [5, 4, 0] {
        let Err(e) = group.configure(rank.configuration("main", epoch)) else {
            return Err(Failure::new(format!("epoch {epoch} after 5 was accepted")));
        };
        ensure!(e.kind() == ErrorKind::InvalidArgument, "epoch {epoch}: {e}");
    }
    let wrong = Configuration {
        rank: rank.world,
        ..rank.configuration("main", 6)
    };
    let Err(e) = group.configure(wrong) else {
        return Err(Failure::new("a rank outside the world was accepted"));
    };
    ensure!(
        e.kind() == ErrorKind::InvalidArgument,
        "rank outside the world: {e}"
    );
    // Refused before anything was touched.
    sum_of(rank.rank, group.as_ref(), rank.world)
}

fn missing(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    // A rank that is still starting when the others' time runs out would be missing too.
    rank.meet("made")?;
    if rank.rank == 1 {
        return rank.meet("given up");
    }
    let mut configuration = rank.configuration("main", 1);
    configuration.deadline = deadline_in(Duration::from_secs(3));
    let Err(e) = group.configure(configuration) else {
        return Err(Failure::new("configure succeeded without rank 1"));
    };
    expected::MISSING.check(&e, &[("N", "1")])?;
    rank.meet("given up")
}

/// Rank 1 does not come while rank 0 waits for it.
fn cancelled(rank: &Rank) -> Outcome {
    let group = rank.unconfigured()?;
    let again = group.capabilities().has(Feature::Reconfigure);
    // Once it has been asked so often, a wait is under way.
    let asked = Arc::new(AtomicU32::new(0));
    let waits = |asked: &AtomicU32| asked.fetch_add(1, Ordering::Relaxed) > 4;
    let configure = |epoch, cancel| {
        let configuration = Configuration {
            cancel,
            ..rank.configuration("main", epoch)
        };
        let began = Instant::now();
        let Err(e) = group.configure(configuration) else {
            return Err(Failure::new("configure succeeded without rank 1"));
        };
        expected::CANCELLED.check(&e, &[("REASON", "enough")])?;
        expected::AFTER_CANCEL.check(began)
    };
    if rank.rank == 0 {
        let (asked, enough) = (asked.clone(), ftcore::Error::new(ErrorKind::Aborted, "enough"));
        configure(1, Cancel::watching(move || waits(&asked).then(|| enough.clone())))?;
    }
    if rank.rank == 0 && again {
        asked.store(0, Ordering::Relaxed);
        let (tell, waiting) = std::sync::mpsc::channel();
        let watched = asked.clone();
        let cancel = Cancel::watching(move || {
            if waits(&watched) {
                let _ = tell.send(());
            }
            None
        });
        std::thread::scope(|scope| {
            let group = &*group;
            scope.spawn(move || waiting.recv().map(|()| group.abort("enough")));
            configure(2, cancel)
        })?;
    }
    rank.meet("given up")?;
    if again {
        group.configure(rank.configuration("main", 3))?;
        rank.leave(group.as_ref())?;
    }
    Ok(())
}

fn killed(rank: &Rank, victim: u32) -> Outcome {
    let group = rank.group()?;
    sum_of(rank.rank, group.as_ref(), rank.world)?;
    if rank.rank == victim {
        rank.meet("submitted")?;
        return rank.die();
    }
    let began = Instant::now();
    let work = submit_large(group.as_ref(), rank.soon())?;
    rank.meet("submitted")?;
    let e = failure_of(rank, group.as_ref(), work)?;
    ensure!(
        e.kind() == ErrorKind::PeerLost,
        "rank {}: {:?}: {e}",
        rank.rank,
        e.kind()
    );
    ensure!(
        e.context().peer == Some(victim),
        "the error does not name rank {victim}: {e}"
    );
    expected::AFTER_DEATH.check(began)?;
    // The survivors go on in the same processes, with one rank less.
    let (own, world) = (rank.rank - u32::from(rank.rank > victim), rank.world - 1);
    let smaller = Configuration {
        rank: own,
        world_size: world,
        ..rank.configuration("main", 2)
    };
    group.configure(smaller)?;
    sum_of(own, group.as_ref(), world)
}

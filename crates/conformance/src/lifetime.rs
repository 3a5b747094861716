//! Who may let go of what, when: dropped works and groups, many operations in flight, several groups, threads, splits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ftcore::{
    DType, ErrorKind, Feature, OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, Status, SubmitOptions, Tensor,
};

use crate::case::{Case, Worlds, eventually};
use crate::failures::abort_by_rank_0;
use crate::messages::tag_of;
use crate::probe::{Probe, moved};
use crate::{Failure, Needs, Outcome, Rank};

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let reduce = Needs::Sum;
    let both = [reduce, Needs::Op(OpKind::Broadcast)];
    let split = [reduce, Needs::Feature(Feature::Split)];
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3, 4]) {
        all.extend([
            Case::new(
                "lifetime::many_operations_in_flight_keep_their_order",
                world,
                &both,
                many,
            )
            .sharing(),
            Case::new(
                "lifetime::a_dropped_work_is_detached",
                world,
                &[reduce],
                dropped_work,
            )
            .sharing(),
            Case::new("lifetime::results_are_taken_once", world, &[reduce], taken_once).sharing(),
            Case::new("lifetime::callbacks_run_once_each", world, &[reduce], callbacks).sharing(),
            Case::new(
                "lifetime::work_ends_though_no_thread_waits_for_it",
                world,
                &[reduce],
                unattended,
            )
            .sharing(),
            // A library of which a process can hold one rank only promises no second group beside the first either.
            Case::new(
                "lifetime::several_groups_at_once_from_threads",
                world,
                &[reduce, Needs::Feature(Feature::ThreadRanks)],
                several_groups,
            ),
            Case::new(
                "lifetime::shutdown_lets_pending_work_end",
                world,
                &[reduce],
                shutdown,
            ),
            Case::new(
                "lifetime::shutdown_early_does_not_disturb_the_others",
                world,
                &[reduce],
                leave_early,
            ),
            Case::new("lifetime::split_by_colour_and_key", world, &split, splits).sharing(),
            Case::new("lifetime::traffic_is_counted", world, &[reduce], traffic).sharing(),
        ]);
    }
    for &world in worlds.or(&[2, 3]) {
        let abort = [Needs::Op(OpKind::Recv), Needs::Feature(Feature::Abort)];
        all.push(Case::new(
            "lifetime::dropping_a_group_ends_its_pending_work",
            world,
            &abort,
            dropped_group,
        ));
        let split = [abort[0], abort[1], reduce, Needs::Feature(Feature::Split)];
        all.push(Case::new(
            "lifetime::a_part_is_watched_after_its_parent_was_dropped",
            world,
            &split,
            dropped_part,
        ));
    }
    all
}

fn many(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let world = rank.world as i32;
    let probe = Probe::of(group.as_ref(), DType::I32);
    let mut works = Vec::new();
    for i in 0..200i32 {
        let n = (i as usize * 37) % 3000;
        let root = (i % world) as u32;
        works.push(if i % 3 == 0 {
            group.broadcast(probe.tensor((i + 1) * (rank.rank as i32 + 1), n), root)?
        } else {
            probe.begin(group.as_ref(), i + rank.rank as i32, n)?
        });
    }
    for (work, i) in works.iter().zip(0i32..).collect::<Vec<_>>().into_iter().rev() {
        let got = work.take_tensor()?;
        let n = (i as usize * 37) % 3000;
        let want = match i % 3 {
            0 => (i + 1) * (i % world + 1),
            _ => i * world + world * (world - 1) / 2,
        };
        probe.check(&format!("operation {i}"), &got, want, n)?;
    }
    Ok(())
}

fn ones(rank: &Rank, group: &dyn ProcessGroup, n: usize) -> Outcome {
    let values = (1, rank.world as i32);
    Probe::of(group, DType::I32).sum(group, "a sum of ones", values, n)
}

fn dropped_work(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    for _ in 0..50 {
        drop(Probe::of(group.as_ref(), DType::F32).begin(group.as_ref(), 0, 5000)?);
    }
    ones(rank, group.as_ref(), 100)
}

fn taken_once(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let work = Probe::of(group.as_ref(), DType::F32).begin(group.as_ref(), 1, 10)?;
    let other = work.clone();
    work.take_tensor()?;
    ensure!(
        matches!(other.status(), Status::Succeeded),
        "a clone says {:?}",
        other.status()
    );
    let Err(e) = other.take() else {
        return Err(Failure::new("the results were taken twice"));
    };
    ensure!(e.kind() == ErrorKind::InvalidState, "{e}");
    ensure!(
        other.timings().duration.is_some(),
        "finished work has no duration"
    );
    Ok(())
}

fn callbacks(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let calls = Arc::new(AtomicU32::new(0));
    let mut works = Vec::new();
    for _ in 0..20 {
        let work = Probe::of(group.as_ref(), DType::F32).begin(group.as_ref(), 0, 300)?;
        let calls = calls.clone();
        work.on_complete(move |status| {
            if matches!(status, Status::Succeeded) {
                calls.fetch_add(1, Ordering::SeqCst);
            }
        });
        works.push(work);
    }
    works.iter().try_for_each(|w| w.wait_done())?;
    eventually("the callbacks", || {
        (calls.load(Ordering::SeqCst) == 20).then_some(())
    })?;
    rank.meet("called")?;
    ensure!(calls.load(Ordering::SeqCst) == 20, "a callback ran twice");
    Ok(())
}

/// Long before any deadline, at which a backend looks at everything.
const AT_ONCE: Duration = Duration::from_secs(10);

/// Short operations, of which a backend may leave a part to the thread that waits. Here none does.
fn unattended(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let probe = Probe::of(group.as_ref(), DType::I32);
    // What one rank does falls between any two steps of another. A backend may carry an operation out within the call, so ranks meet nowhere between.
    for _ in 0..300 {
        let work = probe.begin(group.as_ref(), 1, 3)?;
        let began = Instant::now();
        while matches!(work.status(), Status::Pending) && began.elapsed() < AT_ONCE {
            std::thread::yield_now();
        }
        ends(&work)?;
        probe.check("the sum", &work.take_tensor()?, rank.world as i32, 3)?;
    }
    if rank.world == 1 || !group.capabilities().ops.contains(OpKind::Recv) {
        return Ok(());
    }
    let (next, before) = (
        (rank.rank + 1) % rank.world,
        (rank.rank + rank.world - 1) % rank.world,
    );
    for round in 0..100 {
        let receive = group.recv(probe.tensor(0, 3), before, 0)?;
        if round < 5 {
            rank.meet(&format!("receiving {round}"))?;
        }
        let send = group.send(probe.tensor(rank.rank as i32, 3), next, 0)?;
        ends(&send)?;
        ends(&receive)?;
        probe.check("the message", &receive.take_tensor()?, before as i32, 3)?;
    }
    Ok(())
}

fn ends(work: &ftcore::Work) -> Outcome {
    let began = Instant::now();
    eventually("the end of an operation that no thread waits for", || {
        (!matches!(work.status(), Status::Pending)).then_some(())
    })?;
    ensure!(began.elapsed() < AT_ONCE, "it ended after {:?}", began.elapsed());
    Ok(())
}

fn several_groups(rank: &Rank) -> Outcome {
    let results: Vec<Outcome> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3u64)
            .map(|g| {
                scope.spawn(move || -> Outcome {
                    let group = rank.unconfigured()?;
                    group.configure(rank.configuration(&format!("group{g}"), g + 1))?;
                    let probe = Probe::of(group.as_ref(), DType::I32);
                    for i in 0..30i32 {
                        let value = i * 10 + g as i32;
                        let values = (value, value * rank.world as i32);
                        probe.sum(group.as_ref(), &format!("group {g}"), values, 2000)?;
                    }
                    group.shutdown(rank.soon())?;
                    Ok(())
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| {
                t.join()
                    .unwrap_or_else(|_| Err(Failure::new("a thread panicked")))
            })
            .collect()
    });
    results.into_iter().collect()
}

fn shutdown(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let probe = Probe::of(group.as_ref(), DType::I32);
    let works: Vec<_> = (0..10)
        .map(|_| probe.begin(group.as_ref(), 1, 20_000))
        .collect::<Outcome<_>>()?;
    group.shutdown(rank.soon())?;
    for work in works {
        let sum = work.take_tensor()?;
        probe.check("work at shutdown", &sum, rank.world as i32, 20_000)?;
    }
    group.shutdown(rank.soon())?;
    let op = ftcore::Collective::AllReduce {
        tensors: vec![probe.tensor(1, 1)],
        op: ReduceOp::Sum,
    };
    let Err(rejected) = group.run(op, SubmitOptions::default()) else {
        return Err(Failure::new("a shut-down group accepted work"));
    };
    ensure!(
        rejected.error.kind() == ErrorKind::InvalidState,
        "{}",
        rejected.error
    );
    Ok(())
}

/// A rank that has what it needs may leave while the others are still busy with the same operation.
fn leave_early(rank: &Rank) -> Outcome {
    for epoch in 1..=10 {
        let group = rank.unconfigured()?;
        group.configure(rank.configuration("leaving", epoch))?;
        let n = if epoch % 2 == 0 { 30 } else { 60_000 };
        ones(rank, group.as_ref(), n)?;
        if rank.rank.is_multiple_of(2) {
            group.shutdown(rank.soon())?;
        }
    }
    Ok(())
}

fn splits(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // Even and odd ranks, in reverse order; the last rank of a world above 2 stays out. In small worlds neighbours, or there would be no order.
    let outside = rank.world > 2 && rank.rank == rank.world - 1;
    let color_of = |of: u32| if rank.world > 3 { of % 2 } else { of / 2 };
    let color = (!outside).then_some(color_of(rank.rank));
    let child = group.split(color, 100 - rank.rank, rank.soon())?;
    let Some(child) = child else {
        ensure!(outside, "rank {} got no group", rank.rank);
        return ones(rank, group.as_ref(), 10);
    };
    ensure!(!outside, "a rank without a colour got a group");
    let last = if rank.world > 2 {
        rank.world - 1
    } else {
        rank.world
    };
    let members: Vec<u32> = (0..last).rev().filter(|r| Some(color_of(*r)) == color).collect();
    let info = child.info();
    ensure!(
        info.world_size as usize == members.len(),
        "{info:?} of members {members:?}"
    );
    ensure!(
        members.get(info.rank as usize) == Some(&rank.rank),
        "rank {} became {} of {members:?}",
        rank.rank,
        info.rank
    );
    let values = (rank.rank as i32, members.iter().map(|&r| r as i32).sum());
    Probe::of(child.as_ref(), DType::I32).sum(child.as_ref(), "the child's sum", values, 100)?;
    // Parent and child are independent.
    drop(child);
    ones(rank, group.as_ref(), 10)
}

fn traffic(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let before = group.traffic();
    ones(rank, group.as_ref(), 50_000)?;
    let after = group.traffic();
    let moved = after.sent - before.sent;
    if rank.world == 1 {
        ensure!(moved == 0, "a world of one sent {moved} bytes");
    } else {
        ensure!(moved >= 100_000, "an all-reduce of 200 kB sent {moved} bytes");
        ensure!(after.received > before.received, "nothing was received");
    }
    Ok(())
}

/// Rank 0 drops the group while a receive is pending; the others hear of it.
fn dropped_group(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    // No rank ends it while another still connects.
    rank.meet("configured")?;
    if rank.rank != 0 {
        eventually("the notice", || group.error())?;
        return Ok(());
    }
    let tag = tag_of(group.as_ref(), 9);
    let work = group.recv(Tensor::zeros(moved(group.capabilities()), 4), 1, tag)?;
    drop(group);
    let Err(e) = work.wait(rank.soon()) else {
        return Err(Failure::new("a receive without a sender succeeded"));
    };
    ensure!(e.kind() == ErrorKind::Aborted, "{e}");
    Ok(())
}

/// The group that it was split from is gone on every rank by then.
fn dropped_part(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let part = group.split(Some(0), rank.rank, rank.soon())?;
    let part = part.ok_or_else(|| Failure::new("no part for a rank with a colour"))?;
    drop(group);
    abort_by_rank_0(rank, part.as_ref())
}

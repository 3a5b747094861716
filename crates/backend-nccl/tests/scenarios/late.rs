//! Calls of the library that come back when no caller waits for them any more: what they give then is ended, and what stands is left alone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};
use libtest_mimic::Failed;

use super::endings::until_logged;
use super::kit::*;
use super::parts::message;
use super::set_up::log_lines;
use super::system::nothing_is_left;
use super::{FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

/// How many lines begin like this.
fn count(start: &str) -> Result<usize, Failed> {
    Ok(log_lines()?.iter().filter(|l| l.starts_with(start)).count())
}

/// Waits until every communicator that was made was ended: those who made `made` of them end as many.
fn all_end(made: usize) -> Outcome {
    let until = deadline_in(SOON);
    while count("end abort")? + count("end destroy")? < made {
        check(Instant::now() < until, || {
            format!("not all {made} communicators were ended")
        })?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Rank 1 comes back from joining when both ranks have a communicator of a later epoch. `in_vain`: how many the first epoch made.
fn init_comes_late(options: &GroupOptions, in_vain: usize) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    ranks(2, |rank| {
        let group = group(rank, options.clone())?;
        let c = configuration(&store, rank, 2, 1, Duration::from_millis(1500));
        let e = group.configure(c).err().ok_or("they met")?;
        says(&e, ErrorKind::Timeout, &["phase: communicator"])?;
        store.barrier("both have failed", 2, deadline_in(SOON))?;
        next_epoch(rank, &group, &store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        if rank == 0 {
            let_go()?;
        }
        all_end(in_vain)?;
        sum_works(rank, &group)?;
        store.barrier("both still work", 2, deadline_in(SOON))?;
        Ok(())
    })?;
    nothing_is_left()
}

/// Rank 0's is given up at its deadline, rank 1's when it comes.
fn init_late() -> Outcome {
    init_comes_late(&GroupOptions::default(), 2)
}

/// Rank 0 waits inside the call for rank 1: both come back with a communicator that works.
fn blocking_init_late() -> Outcome {
    let options = GroupOptions {
        blocking: Some(true),
        ..GroupOptions::default()
    };
    init_comes_late(&options, 2)
}

/// It comes back with an error and without a communicator.
fn init_fails_late() -> Outcome {
    init_comes_late(&GroupOptions::default(), 1)
}

/// The receiver's channel opens when the group has failed and both are in a later epoch: two communicators of the group, and the channel's two.
fn channel_late() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        if let Ok(work) = message(rank, group, Duration::from_millis(800)) {
            check(work.wait(deadline_in(SOON)).is_err(), || "it arrived".into())?;
        }
        says(&group_error(group)?, ErrorKind::Timeout, &["deadline"])?;
        next_epoch(rank, group, store)?;
        store.barrier("both go on", 2, deadline_in(SOON))?;
        if rank == 0 {
            let_go()?;
        }
        all_end(4)?;
        sum_works(rank, group)?;
        Ok(store.barrier("both still work", 2, deadline_in(SOON))?)
    })?;
    nothing_is_left()
}

/// How often a split fails late: whether the notice or the call is first on rank 0 is a matter of microseconds.
const ROUNDS: usize = 6;

/// Rank 1's part of a split fails when rank 0 is in the middle of it: both end their communicators, however the notice comes in between, and go
/// on with new ones.
fn split_fails_late() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        for round in 1..=ROUNDS {
            let split = || group.split(Some(1), rank, deadline_in(SOON)).map(drop);
            let split = match rank {
                0 => std::thread::scope(|scope| {
                    let helper = scope.spawn(|| let_go_when_under_way(round));
                    let split = split();
                    helper.join().map_err(|_| Failed::from("a panic"))??;
                    Ok::<_, Failed>(split)
                })?,
                _ => split(),
            };
            says(
                &split.err().ok_or("the split succeeded")?,
                ErrorKind::Backend,
                &["ncclCommSplit"],
            )?;
            if rank == 1 {
                hold_again()?;
            }
            group_error(group)?;
            group.configure(configuration(store, rank, 2, round as u64 + 1, SOON))?;
            sum_works(rank, group)?;
        }
        Ok(())
    })?;
    let (made, want) = (count("init ")?, 2 + 2 * ROUNDS);
    check(made == want, || {
        format!("{made} communicators were made, not {want}")
    })?;
    nothing_is_left()
}

fn let_go_when_under_way(round: usize) -> Outcome {
    let until = deadline_in(SOON);
    while count("held ncclCommSplit")? < round || count("split rank=0")? < round {
        check(Instant::now() < until, || "not both ranks split".into())?;
        std::thread::sleep(Duration::from_millis(2));
    }
    let_go()
}

/// The parent is aborted when its child stands and no group has it yet.
fn child_of_an_aborted_parent() -> Outcome {
    let group = group(0, GroupOptions::default())?;
    group.configure(by_itself(1, SOON))?;
    let split = std::thread::scope(|scope| {
        let splitting = scope.spawn(|| group.split(Some(0), 0, deadline_in(SOON)).map(drop));
        until_logged("held ncclCommGetAsyncError.child")?;
        group.abort("enough");
        until_logged("end abort rank=0")?;
        let_go()?;
        splitting.join().map_err(|_| Failed::from("a panic"))
    })?;
    let e = split.err().ok_or("the split succeeded")?;
    says(&e, ErrorKind::Aborted, &["enough"])?;
    all_end(2)
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let held = |name, what, body| scenario(name, &[(HANG, what), LOG], body);
    vec![
        held(
            "late_answer_of_a_call_that_joins_is_ended",
            "held:ncclCommInitRankConfig@1:1",
            init_late,
        ),
        held(
            "late_answers_of_blocking_calls_that_join_are_ended",
            "held:ncclCommInitRankConfig@1:1",
            blocking_init_late,
        ),
        scenario(
            "late_error_of_a_call_that_joins_costs_nobody",
            &[
                (HANG, "held:ncclCommInitRankConfig@1:1"),
                // The one of the next epoch overtakes it.
                (FAIL, "ncclCommInitRankConfig@1:2:2"),
                LOG,
            ],
            init_fails_late,
        ),
        held(
            "late_answer_of_a_channel_that_opens_is_ended",
            "held:ncclCommInitRankConfig@1:2",
            channel_late,
        ),
        held(
            "late_child_of_a_parent_that_was_aborted_is_ended",
            "held:ncclCommGetAsyncError.child:1",
            child_of_an_aborted_parent,
        ),
        scenario(
            "late_error_of_a_split_ends_the_communicator_on_all_ranks",
            &[
                (
                    HANG,
                    "held:ncclCommSplit@1:1,held:ncclCommSplit@1:2,held:ncclCommSplit@1:3,\
                     held:ncclCommSplit@1:4,held:ncclCommSplit@1:5,held:ncclCommSplit@1:6",
                ),
                (
                    FAIL,
                    "ncclCommSplit@1:1:5,ncclCommSplit@1:2:5,ncclCommSplit@1:3:5,\
                     ncclCommSplit@1:4:5,ncclCommSplit@1:5:5,ncclCommSplit@1:6:5",
                ),
                LOG,
            ],
            split_fails_late,
        ),
    ]
}

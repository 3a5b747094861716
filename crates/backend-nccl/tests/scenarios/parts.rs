//! Communicators beside the group's own: splits that fail or hang, and messages whose channels do.

use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, SubmitOptions, deadline_in};

use super::kit::*;
use super::{ASYNC, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);

/// Rank 0's split fails as said, rank 1 hears of it, and the process goes on.
fn split_breaks(kind: ErrorKind, words: &[&str], limit: Duration) -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let by = if rank == 0 { limit } else { TIME_LIMIT };
        let began = Instant::now();
        let Err(e) = group.split(Some(1), rank, deadline_in(by)).map(drop) else {
            return Err("the split succeeded".into());
        };
        check(began.elapsed() < SOON, || {
            format!("it took {:?}", began.elapsed())
        })?;
        says(&e, if rank == 0 { kind } else { e.kind() }, words)?;
        says(&group_error(group)?, kind, words)?;
        next_epoch(rank, group, store)
    })
}

const LATE: Duration = Duration::from_millis(800);

fn split_hangs() -> Outcome {
    split_breaks(ErrorKind::Timeout, &["ncclCommSplit", "deadline", "split"], LATE)
}

fn split_never_ends() -> Outcome {
    split_breaks(ErrorKind::Timeout, &["did not come together", "split"], LATE)
}

fn split_fails_later() -> Outcome {
    split_breaks(
        ErrorKind::PeerLost,
        &["the communicator", "remote process exited"],
        TIME_LIMIT,
    )
}

fn split_numbers() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        for (color, key, word) in [(u32::MAX, 0, "colour"), (0, u32::MAX, "key")] {
            let e = group.split(Some(color), key, deadline_in(SOON)).err();
            let e = e.ok_or("the number was accepted")?;
            says(&e, ErrorKind::InvalidArgument, &[word, "4294967295", "split"])?;
        }
        sum_works(rank, group)
    })
}

/// From rank 0 to rank 1.
pub(super) fn message(rank: u32, group: &dyn ProcessGroup, by: Duration) -> Result<ftcore::Work, Error> {
    let op = match rank {
        0 => ftcore::Collective::Send {
            tensor: filled(0, 1.0, 10)?,
            peer: 1,
            tag: 0,
        },
        _ => ftcore::Collective::Recv {
            tensor: filled(1, 0.0, 10)?,
            peer: Some(0),
            tag: 0,
        },
    };
    group
        .run(op, SubmitOptions::by(deadline_in(by)))
        .map_err(|rejected| rejected.error)
}

/// The message fails as said, on one rank or both, and the next epoch has new channels.
fn message_breaks(kind: ErrorKind, words: &[&str], by: Duration) -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        let error = match message(rank, group, by) {
            Ok(work) => match work.wait(deadline_in(SOON)) {
                Ok(()) => group_error(group)?,
                Err(e) => e,
            },
            Err(e) => e,
        };
        says(&error, error.kind(), words)?;
        says(&group_error(group)?, kind, words)?;
        next_epoch(rank, group, store)
    })
}

fn channel_hangs() -> Outcome {
    message_breaks(ErrorKind::Timeout, &["deadline"], LATE)
}

fn channel_fails_later() -> Outcome {
    message_breaks(
        ErrorKind::PeerLost,
        &["the communicator", "remote process exited"],
        SOON,
    )
}

fn channel_never_ends() -> Outcome {
    message_breaks(ErrorKind::Timeout, &["deadline"], LATE)
}

/// No peer sends: the one who waits says for whom.
fn channel_waits() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        if rank == 1 {
            let e = message(1, group, LATE)?.wait(deadline_in(SOON)).err();
            says(
                &e.ok_or("it arrived")?,
                ErrorKind::Timeout,
                &["a message from rank 0", "recv"],
            )?;
        }
        says(
            &group_error(group)?,
            ErrorKind::Timeout,
            &["a message from rank 0"],
        )?;
        next_epoch(rank, group, store)
    })
}

/// What stands in the store where the channel's id should be is not one.
fn channel_garbage() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        if rank == 0 {
            store.set("errors/1/channel-0-1", b"nonsense", deadline_in(SOON))?;
            store.barrier("it stands there", 2, deadline_in(SOON))?;
            let e = group_error(group)?;
            says(
                &e,
                ErrorKind::Protocol,
                &["rank 1", "rank 0's unique id has 8 bytes"],
            )?;
        } else {
            store.barrier("it stands there", 2, deadline_in(SOON))?;
            let e = message(1, group, SOON)?.wait(deadline_in(SOON)).err();
            says(
                &e.ok_or("it succeeded")?,
                ErrorKind::Protocol,
                &["rank 0's unique id has 8 bytes", "recv"],
            )?;
        }
        next_epoch(rank, group, store)
    })
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let one = |name, variable, value, body| scenario(name, &[(variable, value)], body);
    vec![
        one(
            "split_that_never_returns_ends_at_its_deadline",
            HANG,
            "call:ncclCommSplit@0:1",
            split_hangs,
        ),
        one(
            "split_that_never_ends_ends_at_its_deadline",
            HANG,
            "progress:ncclCommSplit@0:1",
            split_never_ends,
        ),
        one(
            "split_whose_child_fails_later_is_told_to_all",
            ASYNC,
            "ncclCommSplit@0:1:6",
            split_fails_later,
        ),
        one(
            "split_whose_child_alone_fails_is_told_to_all",
            ASYNC,
            "ncclCommSplit.child@0:1:6",
            split_fails_later,
        ),
        scenario("split_numbers_that_nccl_has_not_are_refused", &[], split_numbers),
        one(
            "channel_that_never_opens_ends_at_the_deadline",
            HANG,
            "call:ncclCommInitRankConfig@1:2",
            channel_hangs,
        ),
        one(
            "channel_that_fails_later_fails_the_group",
            ASYNC,
            "ncclSend@0:1:6",
            channel_fails_later,
        ),
        one(
            "channel_that_never_ends_ends_at_the_deadline",
            HANG,
            "device:ncclSend@0:1",
            channel_never_ends,
        ),
        scenario(
            "channel_without_a_sender_ends_at_the_deadline",
            &[],
            channel_waits,
        ),
        scenario(
            "channel_that_fails_when_its_message_was_sent_off_fails_the_group",
            &[
                (ASYNC, "ncclSend@0:1:6"),
                ("OXCCL_STANDIN_CUDA_DELAY_US", "30000"),
            ],
            channel_fails_later,
        ),
        scenario("channel_id_that_is_none_is_refused", &[], channel_garbage),
    ]
}

//! Barriers hold every rank until all are there; the monitored one names who is not.

use std::time::Duration;

use ftcore::{ErrorKind, OpKind, ProcessGroupExt, SubmitOptions, deadline_in};

use crate::case::{Case, Worlds};
use crate::{Needs, Outcome, Rank};

pub(crate) fn cases(worlds: Worlds) -> Vec<Case> {
    let mut all = Vec::new();
    for &world in worlds.or(&[1, 2, 3, 4]) {
        let plain = [Needs::Op(OpKind::Barrier)];
        let all_come = Case::new("barrier::holds_all_ranks", world, &plain, |r| holds(r, false));
        all.push(all_come.sharing());
        let monitored = [Needs::Op(OpKind::MonitoredBarrier)];
        let name = "monitored_barrier::holds_all_ranks";
        let all_come = Case::new(name, world, &monitored, |r| holds(r, true));
        all.push(all_come.sharing());
    }
    for &world in worlds.or(&[3, 4]) {
        let monitored = [Needs::Op(OpKind::MonitoredBarrier), Needs::Op(OpKind::Barrier)];
        all.push(Case::new(
            "monitored_barrier::names_the_missing_ranks_on_every_rank",
            world,
            &monitored,
            missing,
        ));
    }
    all
}

/// Every rank counts up before it enters; behind the barrier the count is complete.
fn holds(rank: &Rank, monitored: bool) -> Outcome {
    let group = rank.group()?;
    for round in 1..=20i64 {
        let now = rank.store.add("entered", 1, rank.soon())?;
        ensure!(now <= round * i64::from(rank.world), "a rank ran ahead");
        if monitored {
            group.monitored_barrier(true, SubmitOptions::by(rank.soon()))?;
        } else {
            group.barrier()?;
        }
        let then = rank.store.add("entered", 0, rank.soon())?;
        ensure!(
            then >= round * i64::from(rank.world),
            "the barrier opened when {then} of {} had entered",
            round * i64::from(rank.world)
        );
    }
    Ok(())
}

/// Ranks from 2 on stay away.
fn missing(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    group.barrier()?;
    if rank.rank >= 2 {
        // Told by rank 0 although it did not take part.
        let e = crate::case::eventually("the notice of the time-out", || group.error())?;
        ensure!(e.kind() == ErrorKind::Timeout, "the absent rank hears {e}");
        return Ok(());
    }
    // Another rank that is later than that is missing, too.
    let by = SubmitOptions::by(deadline_in(Duration::from_secs(2)));
    let Err(e) = group.monitored_barrier(true, by) else {
        return Err(crate::Failure::new("the barrier opened without all ranks"));
    };
    let absent: Vec<String> = (2..rank.world).map(|r| r.to_string()).collect();
    let absent = match absent.as_slice() {
        [one] => format!("rank {one}"),
        several => format!("ranks {}", several.join(", ")),
    };
    crate::expected::ABSENT.check(&e, &[("RANKS", &absent)])
}

//! Communicators made out of the last configuration's (`reuse_communicators`): when that is done, when not, and what happens when a step of
//! it fails or hangs. The stand-in's log says which calls arrived.

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_nccl::NcclGroup;
use ftcore::{Error, ErrorKind, GroupOptions, InMemoryStore, ProcessGroup, Store, deadline_in};

use super::kit::*;
use super::set_up::log_lines;
use super::{ASYNC, FAIL, HANG, Scenario, scenario};

const SOON: Duration = Duration::from_secs(20);
/// The half of it that a reuse may take is spent where a call hangs.
const SHORT: Duration = Duration::from_secs(2);
const LONG: &str = "20000";
const LOG: (&str, &str) = ("OXCCL_STANDIN_NCCL_LOG", "@log");

/// A newcomer among the members of the second configuration.
const NEW: u32 = u32::MAX;

/// A world of `first` ranks, then one with `next`: the old ranks in the order of their new ones.
struct Scene {
    first: u32,
    next: &'static [u32],
    /// Somebody aborts the first world, one who leaves if there is one; otherwise all are idle.
    fails: bool,
    patience: Duration,
    /// How long a revocation may take.
    revoke_ms: &'static str,
}

/// On a busy machine a revocation may take much longer than an abort may, and is an abort then: right, but not what these are about.
pub(super) fn options() -> GroupOptions {
    options_with(LONG)
}

fn options_with(revoke_ms: &str) -> GroupOptions {
    let mut options = GroupOptions::default();
    options.hints.insert("reuse_communicators".into(), "on".into());
    options.hints.insert("revoke_ms".into(), revoke_ms.into());
    options
}

pub(super) fn sum_is(rank: u32, group: &NcclGroup, want: f32) -> Outcome {
    for _ in 0..3 {
        let result = read(&submit(rank, group, SOON)?.take_tensor()?)?;
        check(result == vec![want; 1000], || {
            format!("the sum is {:?}, not {want}", result.first())
        })?;
    }
    Ok(())
}

impl Scene {
    fn aborts(&self, old: u32) -> bool {
        let leaver = (0..self.first).find(|r| !self.next.contains(r)).unwrap_or(0);
        self.fails && old == leaver
    }

    /// One rank: `old` in the first world if it was there, `new` in the second if it is there. What the second `configure` said.
    fn act(&self, old: Option<u32>, new: Option<u32>, store: &Arc<dyn Store>) -> Result<(), Error> {
        let fail = |e: libtest_mimic::Failed| Error::invalid(e.message().unwrap_or("failed").to_string());
        let device = old.or(new).unwrap_or(0);
        let group = group(device, options_with(self.revoke_ms))?;
        if let Some(old) = old {
            group.configure(configuration(store, old, self.first, 1, SOON))?;
            sum_is(device, &group, self.first as f32).map_err(fail)?;
            store.barrier("the first world works", self.first, deadline_in(SOON))?;
            if self.aborts(old) {
                group.abort("the world is to end");
            }
            if self.fails {
                group_error(&group).map_err(fail)?;
            }
        }
        let Some(new) = new else { return Ok(()) };
        let world = self.next.len() as u32;
        group.configure(configuration(store, new, world, 2, self.patience))?;
        sum_is(device, &group, world as f32).map_err(fail)?;
        store.barrier("the second world works", world, deadline_in(SOON))?;
        Ok(())
    }

    /// What every rank of the second configuration said.
    fn play(&self) -> Result<Vec<Result<(), Error>>, libtest_mimic::Failed> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        let store = &store;
        std::thread::scope(|scope| {
            let leavers: Vec<_> = (0..self.first)
                .filter(|old| !self.next.contains(old))
                .map(|old| scope.spawn(move || self.act(Some(old), None, store)))
                .collect();
            let stayers: Vec<_> = (0u32..)
                .zip(self.next)
                .map(|(new, old)| {
                    let old = Some(*old).filter(|old| *old != NEW);
                    scope.spawn(move || self.act(old, Some(new), store))
                })
                .collect();
            for leaver in leavers {
                leaver.join().map_err(|_| "a panic")??;
            }
            let said = stayers
                .into_iter()
                .map(|t| t.join().map_err(|_| "a panic".into()));
            said.collect()
        })
    }

    fn works(&self) -> Outcome {
        Ok(self.play()?.into_iter().collect::<Result<(), Error>>()?)
    }
}

/// How many lines begin like this.
pub(super) fn count(start: &str) -> Result<usize, libtest_mimic::Failed> {
    Ok(log_lines()?.iter().filter(|l| l.starts_with(start)).count())
}

pub(super) fn counts(wanted: &[(&str, usize)]) -> Outcome {
    wanted.iter().try_for_each(|(start, want)| {
        let got = count(start)?;
        check(got == *want, || format!("'{start}' came {got} times, not {want}"))
    })
}

/// Waits until every communicator that was made was ended: those who made `made` of them end as many.
pub(super) fn all_end(made: usize) -> Outcome {
    let until = deadline_in(SOON);
    while count("end abort")? + count("end destroy")? < made {
        check(Instant::now() < until, || {
            format!("not all {made} communicators were ended")
        })?;
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

const A_DEATH: Scene = Scene {
    first: 3,
    next: &[0, 2],
    fails: true,
    patience: SOON,
    revoke_ms: LONG,
};

fn death() -> Outcome {
    A_DEATH.works()?;
    counts(&[
        ("init ", 3),
        ("shrink rank=0 of=3 without=[1]", 1),
        ("shrink rank=2 of=3 without=[1]", 1),
        ("end revoke rank=0", 1),
        ("end revoke rank=2", 1),
    ])?;
    // Three parents and two children.
    all_end(5)
}

fn last_survivor() -> Outcome {
    let scene = Scene {
        next: &[2],
        ..A_DEATH
    };
    scene.works()?;
    counts(&[("init ", 3), ("shrink rank=2 of=3 without=[0, 1]", 1)])
}

fn leaving() -> Outcome {
    let scene = Scene {
        fails: false,
        ..A_DEATH
    };
    scene.works()?;
    counts(&[("init ", 3), ("shrink rank=", 4), ("end revoke", 0)])?;
    all_end(5)
}

fn all_well() -> Outcome {
    let scene = Scene {
        first: 2,
        next: &[1, 0],
        fails: false,
        patience: SOON,
        revoke_ms: LONG,
    };
    scene.works()?;
    counts(&[("init ", 2), ("split ", 2), ("end revoke", 0)])?;
    all_end(4)
}

fn all_stay() -> Outcome {
    let scene = Scene {
        first: 2,
        next: &[0, 1],
        fails: true,
        patience: SOON,
        revoke_ms: LONG,
    };
    scene.works()?;
    counts(&[("init ", 2), ("split ", 2), ("end revoke", 2)])
}

const A_NEWCOMER: Scene = Scene {
    first: 2,
    next: &[0, 1, NEW],
    fails: false,
    patience: SOON,
    revoke_ms: LONG,
};

fn newcomer() -> Outcome {
    A_NEWCOMER.works()?;
    counts(&[
        ("init ", 2),
        ("grow rank=0 of=3 from=2", 1),
        ("grow rank=1 of=3 from=2", 1),
        ("grow rank=2 of=3 as a newcomer", 1),
        ("split ", 0),
    ])?;
    all_end(5)
}

fn newcomer_after_a_failure() -> Outcome {
    let scene = Scene {
        fails: true,
        ..A_NEWCOMER
    };
    scene.works()?;
    // The library promises to grow only what was not revoked.
    counts(&[("init ", 2), ("split ", 2), ("grow rank=2 of=3 as a newcomer", 1)])
}

fn replacement() -> Outcome {
    let scene = Scene {
        next: &[0, 2, NEW],
        ..A_DEATH
    };
    scene.works()?;
    counts(&[
        ("init ", 3),
        ("shrink rank=2 of=3 without=[1]", 1),
        ("grow rank=1 of=3 from=2", 1),
        ("grow rank=2 of=3 as a newcomer", 1),
    ])?;
    // Three parents, two that were shrunk, three that were grown.
    all_end(8)
}

fn turned() -> Outcome {
    let scene = Scene {
        next: &[2, 0],
        ..A_DEATH
    };
    scene.works()?;
    counts(&[("init ", 5), ("shrink ", 0)])
}

fn newcomer_in_front() -> Outcome {
    let scene = Scene {
        next: &[NEW, 0, 1],
        ..A_NEWCOMER
    };
    scene.works()?;
    counts(&[("init ", 5), ("grow ", 0)])
}

/// A step fails or hangs on one rank: all ranks go on with a new communicator.
fn fresh_instead(scene: &Scene) -> Outcome {
    let began = Instant::now();
    let scene = Scene {
        patience: SHORT * 2,
        ..*scene
    };
    scene.works()?;
    let made = scene.first as usize + scene.next.len();
    counts(&[("init ", made)])?;
    check(began.elapsed() < SOON, || {
        format!("it took {:?}", began.elapsed())
    })
}

pub(super) fn death_goes_on_anew() -> Outcome {
    fresh_instead(&A_DEATH)
}

/// The library does not come back from the revocation.
fn death_goes_on_anew_after_an_abort() -> Outcome {
    fresh_instead(&Scene {
        revoke_ms: "40",
        ..A_DEATH
    })
}

pub(super) fn newcomer_goes_on_anew() -> Outcome {
    fresh_instead(&A_NEWCOMER)
}

/// Neither way works: every rank is told why.
fn nothing_works() -> Outcome {
    let scene = Scene {
        patience: SHORT,
        ..A_DEATH
    };
    let said = scene.play()?;
    let [Err(zero), Err(one)] = said.as_slice() else {
        return Err(format!("a configure succeeded: {said:?}").into());
    };
    says(zero, ErrorKind::Backend, &["ncclGetUniqueId", "configure"])?;
    says(one, ErrorKind::Backend, &["rank 0 reports", "ncclGetUniqueId"])
}

/// A call that came apart leaves a communicator that nobody may build on.
fn after_a_broken_split() -> Outcome {
    two(options(), |rank, group, store| {
        check(group.split(Some(1), rank, deadline_in(SOON)).is_err(), || {
            "the split succeeded".into()
        })?;
        group_error(group)?;
        next_epoch(rank, group, store)
    })
}

/// On both ranks, or on the one that comes first: if both held theirs for the next epoch, it would be split of all.
fn split_breaks_everywhere() -> Outcome {
    after_a_broken_split()?;
    counts(&[("split ", 0)])
}

fn split_breaks() -> Outcome {
    after_a_broken_split()?;
    // Rank 0 may have heard of the failure before it began its own call: what it holds is whole then, and rank 1 may join it.
    counts(&[("split rank=1", 0), ("shrink rank=1", 0)])
}

/// Nobody came: what was held is held for the next try.
fn missed() -> Outcome {
    two(options(), |rank, group, store| {
        sum_works(rank, group)?;
        let c = configuration(store, rank, 3, 2, Duration::from_millis(400));
        check(group.configure(c).is_err(), || "the third came".into())?;
        group.configure(configuration(store, rank, 2, 3, SOON))?;
        sum_works(rank, group)
    })?;
    counts(&[("init ", 2), ("split ", 2)])
}

fn shut_down() -> Outcome {
    two(options(), |rank, group, store| {
        sum_works(rank, group)?;
        store.barrier("both are through", 2, deadline_in(SOON))?;
        group.shutdown(deadline_in(SOON))?;
        next_epoch(rank, group, store)
    })?;
    // In good order, and made anew: a shut-down leaves nothing.
    counts(&[("init ", 4), ("split ", 0)])?;
    all_end(4)
}

fn many_epochs() -> Outcome {
    two(options(), |rank, group, store| {
        for epoch in 2..12u64 {
            sum_works(rank, group)?;
            if epoch % 3 == 0 {
                store.barrier(&format!("before {epoch}"), 2, deadline_in(SOON))?;
                if rank == 1 {
                    group.abort("enough");
                }
                group_error(group)?;
            }
            group.configure(configuration(store, rank, 2, epoch, SOON))?;
        }
        sum_works(rank, group)
    })?;
    counts(&[("init ", 2), ("split ", 20)])?;
    all_end(22)
}

fn registered() -> Outcome {
    let mut options = options();
    options.hints.insert("buffers".into(), "registered".into());
    two(options, |rank, group, store| {
        let tensor = group.alloc(ftcore::DType::F32, &[100], deadline_in(SOON))?;
        group.configure(configuration(store, rank, 2, 2, SOON))?;
        store.barrier("both have it", 2, deadline_in(SOON))?;
        if rank == 0 {
            group.abort("enough");
        }
        group_error(group)?;
        group.configure(configuration(store, rank, 2, 3, SOON))?;
        drop(tensor);
        sum_works(rank, group)
    })?;
    all_end(6)?;
    let until = deadline_in(SOON);
    while count("memory free bytes=")? < 2 {
        check(Instant::now() < until, || "a buffer was not freed".into())?;
        std::thread::sleep(Duration::from_millis(2));
    }
    counts(&[("memory free of a registered buffer", 0)])
}

fn refused() -> Outcome {
    let e = group(0, options()).err().ok_or("a group was made")?;
    says(
        &e,
        ErrorKind::InvalidArgument,
        &["reuse_communicators", "ncclCommRevoke"],
    )?;
    let lenient = GroupOptions {
        lenient: true,
        ..options()
    };
    two(lenient, |rank, group, store| {
        sum_works(rank, group)?;
        next_epoch(rank, group, store)
    })
}

pub(super) fn scenarios() -> Vec<Scenario> {
    let plain = |name, body| scenario(name, &[LOG], body);
    let fault = |name, variable, value, body| scenario(name, &[LOG, (variable, value)], body);
    vec![
        plain("reuse_survivors_of_a_death_shrink", death),
        plain("reuse_the_last_survivor_shrinks_to_itself", last_survivor),
        plain("reuse_who_leaves_in_good_order_is_shrunk_away", leaving),
        plain("reuse_the_same_ranks_in_another_order_split", all_well),
        plain("reuse_the_same_ranks_after_a_failure_split", all_stay),
        plain("reuse_a_newcomer_joins_by_growing", newcomer),
        plain(
            "reuse_a_newcomer_after_a_failure_joins_what_was_split",
            newcomer_after_a_failure,
        ),
        plain("reuse_a_replacement_joins_what_was_shrunk", replacement),
        plain("reuse_an_order_that_nccl_would_not_keep_is_made_anew", turned),
        plain("reuse_a_newcomer_in_front_is_made_anew", newcomer_in_front),
        fault(
            "reuse_shrink_that_fails_goes_on_anew",
            FAIL,
            "ncclCommShrink@0:1:3",
            death_goes_on_anew,
        ),
        fault(
            "reuse_shrink_that_never_returns_goes_on_anew",
            HANG,
            "call:ncclCommShrink@2:1",
            death_goes_on_anew,
        ),
        // Rank 0's parent is aborted first, then the child that never came about.
        scenario(
            "reuse_shrink_whose_child_cannot_be_aborted_goes_on_anew",
            &[
                LOG,
                (HANG, "call:ncclCommShrink@2:1"),
                (FAIL, "ncclCommAbort@0:2:3"),
            ],
            death_goes_on_anew,
        ),
        fault(
            "reuse_shrink_that_stays_in_progress_goes_on_anew",
            HANG,
            "progress:ncclCommShrink@2:1",
            death_goes_on_anew,
        ),
        fault(
            "reuse_shrink_that_fails_later_goes_on_anew",
            ASYNC,
            "ncclCommShrink@0:1:6",
            death_goes_on_anew,
        ),
        fault(
            "reuse_shrink_whose_child_alone_fails_goes_on_anew",
            ASYNC,
            "ncclCommShrink.child@0:1:6",
            death_goes_on_anew,
        ),
        scenario(
            "reuse_without_a_word_on_the_rank_trusts_the_plan",
            &[
                LOG,
                ("OXCCL_NCCL_PATH", "@norank"),
                ("OXCCL_CUDA_PATH", "@norank"),
            ],
            death,
        ),
        fault(
            "reuse_shrink_that_gives_nothing_goes_on_anew",
            FAIL,
            "ncclCommShrink@2:1:0",
            death_goes_on_anew,
        ),
        fault(
            "reuse_shrink_that_makes_another_order_goes_on_anew",
            FAIL,
            "ncclCommUserRank@1:1:0",
            death_goes_on_anew,
        ),
        fault(
            "reuse_shrink_without_a_count_goes_on_anew",
            FAIL,
            // Three of the first configuration.
            "ncclCommCount@0:2:1",
            death_goes_on_anew,
        ),
        fault(
            "reuse_revoke_that_fails_is_an_abort",
            FAIL,
            "ncclCommRevoke@0:1:3",
            death_goes_on_anew,
        ),
        fault(
            "reuse_revoke_that_never_returns_is_an_abort",
            HANG,
            "call:ncclCommRevoke@0:1",
            death_goes_on_anew_after_an_abort,
        ),
        fault(
            "reuse_revoke_that_never_ends_is_an_abort",
            HANG,
            "progress:ncclCommRevoke@0:1",
            death_goes_on_anew_after_an_abort,
        ),
        fault(
            "reuse_grow_that_fails_goes_on_anew",
            FAIL,
            "ncclCommGrow@1:1:3",
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_grow_that_fails_for_the_newcomer_goes_on_anew",
            FAIL,
            "ncclCommGrow@2:1:3",
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_grow_that_never_returns_goes_on_anew",
            HANG,
            "call:ncclCommGrow@2:1",
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_grow_that_stays_in_progress_goes_on_anew",
            HANG,
            "progress:ncclCommGrow@1:1",
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_grow_that_fails_later_goes_on_anew",
            ASYNC,
            "ncclCommGrow@2:1:6",
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_grow_without_an_id_goes_on_anew",
            FAIL,
            "ncclCommGetUniqueId:1:3",
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_grow_whose_id_never_comes_goes_on_anew",
            HANG,
            "call:ncclCommGetUniqueId:1",
            newcomer_goes_on_anew,
        ),
        scenario(
            "reuse_without_grow_is_made_anew",
            &[
                LOG,
                ("OXCCL_NCCL_PATH", "@nogrow"),
                ("OXCCL_CUDA_PATH", "@nogrow"),
            ],
            newcomer_goes_on_anew,
        ),
        fault(
            "reuse_that_fails_where_a_new_one_does_too_is_told_to_all",
            FAIL,
            // The first was the first world's.
            "ncclCommShrink@0:1:3,ncclGetUniqueId:2:2",
            nothing_works,
        ),
        fault(
            "reuse_of_what_a_split_broke_is_not_tried",
            FAIL,
            "ncclCommSplit@1:1:5",
            split_breaks,
        ),
        fault(
            "reuse_of_what_a_split_broke_on_all_ranks_is_not_tried",
            FAIL,
            "ncclCommSplit@0:1:5,ncclCommSplit@1:1:5",
            split_breaks_everywhere,
        ),
        plain("reuse_is_there_for_the_next_try_if_nobody_came", missed),
        plain("reuse_ends_with_a_shut_down", shut_down),
        plain("reuse_goes_on_over_many_epochs", many_epochs),
        plain("reuse_keeps_registered_buffers_right", registered),
        scenario(
            "reuse_without_the_functions_is_refused_by_name_or_dropped_aloud",
            &[("OXCCL_NCCL_PATH", "@old"), ("OXCCL_CUDA_PATH", "@old")],
            refused,
        ),
    ]
}

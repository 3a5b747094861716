//! A model of races in the engine's shell: shuttle runs the real locks, the real executor and the real hand-over of news under
//! thousands of schedules.
//!
//! `cargo test -p ftcore --features shuttle --test engine_model`

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ftcore::engine::{Driver, Ended, Engine, Job, Label, Place, Rules, Ticket};
use ftcore::flight_recorder::Summary;
use ftcore::lifecycle::Engine as _;
use ftcore::{Collective, Completion, Error, ErrorKind, OpKind, Result, Status, deadline_in};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

const SCHEDULES: usize = 3_000;
const PLACE: Place = Place {
    rank: 0,
    world: 2,
    epoch: 1,
};

struct Nothing;

impl Job for Nothing {
    fn into_op(self) -> Collective {
        Collective::Barrier
    }
}

/// What the threads of one run have in common.
#[derive(Default)]
struct Shared {
    /// Operations in flight.
    out: Mutex<Vec<Ticket<Model>>>,
    moved: Condvar,
    interrupted: Mutex<bool>,
    interrupts: AtomicU32,
    releases: AtomicU32,
}

/// Blocks in `enqueue` until it is interrupted or let through, or leaves the answer to another thread.
struct Model {
    shared: Arc<Shared>,
    blocks: bool,
}

impl Driver for Model {
    type Job = Nothing;

    fn enqueue(&self, _: Nothing, ticket: Ticket<Self>) {
        if !self.blocks {
            let mut out = self.shared.out.lock().unwrap();
            if *self.shared.interrupted.lock().unwrap() {
                drop(out);
                return ticket.refuse(Error::new(ErrorKind::Backend, "interrupted"), Vec::new());
            }
            out.push(ticket);
            drop(out);
            self.shared.moved.notify_all();
            return;
        }
        let mut interrupted = self.shared.interrupted.lock().unwrap();
        while !*interrupted {
            interrupted = self.shared.moved.wait(interrupted).unwrap();
        }
        drop(interrupted);
        ticket.fail(Error::new(ErrorKind::Backend, "interrupted"), Vec::new());
    }

    fn interrupt(&self, _: &Error, ended: Ended<Self>) {
        self.shared.interrupts.fetch_add(1, Ordering::SeqCst);
        *self.shared.interrupted.lock().unwrap() = true;
        self.shared.moved.notify_all();
        // What comes later is given back by `enqueue`.
        let mine = std::mem::take(&mut *self.shared.out.lock().unwrap());
        for ticket in mine {
            ticket.refuse(Error::new(ErrorKind::Backend, "interrupted"), Vec::new());
        }
        ended.clean();
    }

    fn release(&self) -> Result<()> {
        self.shared.releases.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// What the callers were told: each number once, in order.
#[derive(Default)]
struct Told(std::sync::Mutex<Vec<(u32, bool)>>);

fn label() -> Label {
    Label {
        kind: OpKind::Barrier,
        data: None,
        message: None,
        submitted: Instant::now(),
        summary: Summary::of(&ftcore::Collective::Barrier),
    }
}

fn start(blocks: bool, shared: &Arc<Shared>) -> Arc<Engine<Model>> {
    let driver = Model {
        shared: shared.clone(),
        blocks,
    };
    let rules = Rules {
        depth: if blocks { 1 } else { usize::MAX },
        grace: Duration::from_secs(3600),
        gives_up: false,
    };
    Engine::start("ox-model", PLACE, rules, driver).unwrap()
}

fn submit(engine: &Arc<Engine<Model>>, number: u32, told: &Arc<Told>, here: bool) -> bool {
    let deadline = deadline_in(Duration::from_secs(3600));
    let submitted = match here {
        true => engine.submit_here(Nothing, label(), deadline),
        false => engine.submit(Nothing, label(), deadline),
    };
    let told = told.clone();
    let accepted = submitted.map(|work| {
        work.on_complete(move |status| {
            let succeeded = matches!(status, Status::Succeeded);
            told.0.lock().unwrap().push((number, succeeded));
        });
    });
    accepted.is_ok()
}

/// Answers what is in flight, the later one first where there are several.
fn answer(shared: &Shared) {
    let ticket = shared.out.lock().unwrap().pop();
    if let Some(ticket) = ticket {
        ticket.succeed(Completion {
            tensors: Vec::new(),
            source: None,
            contributors: 0,
        });
    }
}

fn check(told: &Told, accepted: &[bool], shared: &Shared, failed: bool) {
    let told = told.0.lock().unwrap().clone();
    let mut numbers: Vec<u32> = told.iter().map(|(n, _)| *n).collect();
    numbers.sort_unstable();
    let wanted: Vec<u32> = (0u32..)
        .zip(accepted)
        .filter(|(_, a)| **a)
        .map(|(n, _)| n)
        .collect();
    assert_eq!(numbers, wanted, "each accepted operation is told once");
    let good: Vec<u32> = told.iter().filter(|(_, good)| *good).map(|(n, _)| *n).collect();
    assert!(good.is_sorted(), "successes are told in order: {told:?}");
    assert!(
        told.is_sorted_by_key(|(_, good)| !*good),
        "nothing succeeds after a failure: {told:?}"
    );
    assert_eq!(shared.interrupts.load(Ordering::SeqCst), u32::from(failed));
    assert!(shared.releases.load(Ordering::SeqCst) <= 1);
}

fn under_every_schedule(model: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(model.clone(), SCHEDULES);
    shuttle::check_pct(model, SCHEDULES, 3);
}

fn race(blocks: bool, aborts: bool) {
    let shared = Arc::new(Shared::default());
    let told = Arc::new(Told::default());
    let engine = start(blocks, &shared);
    let (submitting, its, theirs) = (engine.clone(), told.clone(), shared.clone());
    let submitter = thread::spawn(move || {
        (0..3)
            .map(|n| submit(&submitting, n, &its, n == 1))
            .collect::<Vec<_>>()
    });
    let answering = thread::spawn(move || (0..4).for_each(|_| answer(&theirs)));
    let ending = engine.clone();
    let ender = thread::spawn(move || match aborts {
        true => ending.abort("enough"),
        false => ending.leave("done"),
    });
    ender.join().unwrap();
    let accepted = submitter.join().unwrap();
    answering.join().unwrap();
    if blocks || !aborts {
        engine.abort("the end of the run");
    }
    engine.wait_ended(deadline_in(Duration::from_secs(3600))).unwrap();
    while Arc::strong_count(&engine) > 1
        && told.0.lock().unwrap().len() < accepted.iter().filter(|a| **a).count()
    {
        thread::yield_now();
    }
    let failed = engine.error().is_some();
    check(&told, &accepted, &shared, failed);
}

#[test]
fn submitting_answering_and_aborting_at_once_tells_each_caller_once_and_in_order() {
    under_every_schedule(|| race(false, true));
}

#[test]
fn submitting_and_leaving_at_once_loses_no_operation_and_no_wake_up() {
    under_every_schedule(|| race(false, false));
}

#[test]
fn an_abort_ends_a_call_that_blocks_and_what_waits_behind_it() {
    under_every_schedule(|| race(true, true));
}

#[test]
fn a_drain_lets_what_is_pending_end_and_releases_the_driver_once() {
    under_every_schedule(|| {
        let shared = Arc::new(Shared::default());
        let told = Arc::new(Told::default());
        let engine = start(false, &shared);
        let accepted: Vec<bool> = (0..2).map(|n| submit(&engine, n, &told, false)).collect();
        let theirs = shared.clone();
        let answering = thread::spawn(move || {
            for _ in 0..2 {
                let mut out = theirs.out.lock().unwrap();
                while out.is_empty() {
                    out = theirs.moved.wait(out).unwrap();
                }
                drop(out);
                answer(&theirs);
            }
        });
        engine.drain(deadline_in(Duration::from_secs(3600))).unwrap();
        answering.join().unwrap();
        check(&told, &accepted, &shared, false);
        assert_eq!(shared.releases.load(Ordering::SeqCst), 1);
        assert!(!submit(&engine, 2, &told, false), "accepted after the drain");
    });
}

//! A model of races in the engine's shell: shuttle runs the real locks, the real executor and the real hand-over of notice under
//! thousands of schedules.
//!
//! `cargo test -p ftcore --features shuttle --test engine_model`

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ftcore::engine::{Channel, Driver, Ended, Engine, Job, Label, Place, Rules, Ticket};
use ftcore::flight_recorder::Summary;
use ftcore::lifecycle::Engine as _;
use ftcore::{Collective, Completion, Epoch, Error, ErrorKind, OpKind, Result, Status, deadline_in};
use shuttle::sync::{Condvar, Mutex};
use shuttle::thread;

const SCHEDULES: usize = 3_000;
/// Messages of which the end lets a collective through.
const MESSAGES: u32 = 2;
const PLACE: Place = Place {
    rank: 0,
    world: 2,
    epoch: Epoch(1),
};

/// A collective, or a message in a channel of its own.
struct Nothing {
    message: bool,
}

impl Job for Nothing {
    fn into_op(self) -> Collective {
        Collective::Barrier
    }

    fn channel(&self, label: &Label) -> Channel {
        match self.message {
            true => Channel::Messages {
                send: true,
                peer: Some(1),
                tag: 0,
            },
            false => label.channel(),
        }
    }
}

/// What the threads of one run have in common.
struct Shared<const EACH: bool> {
    /// Operations in flight.
    out: Mutex<Vec<Ticket<Model<EACH>>>>,
    moved: Condvar,
    interrupted: Mutex<bool>,
    /// Messages that are through.
    messages: AtomicU32,
    interrupts: AtomicU32,
    releases: AtomicU32,
}

impl<const EACH: bool> Default for Shared<EACH> {
    fn default() -> Self {
        Self {
            out: Mutex::default(),
            moved: Condvar::default(),
            interrupted: Mutex::default(),
            messages: AtomicU32::default(),
            interrupts: AtomicU32::default(),
            releases: AtomicU32::default(),
        }
    }
}

/// Blocks in `enqueue` until it is interrupted or all messages are through, or leaves the answer to another thread. `EACH` channel has an executor, or there is one.
struct Model<const EACH: bool> {
    shared: Arc<Shared<EACH>>,
    blocks: bool,
}

impl<const EACH: bool> Driver for Model<EACH> {
    type Job = Nothing;
    const BLOCKS: bool = EACH;

    fn enqueue(&self, job: Nothing, ticket: Ticket<Self>) {
        if job.message && self.blocks {
            let _interrupted = self.shared.interrupted.lock().unwrap();
            self.shared.messages.fetch_add(1, Ordering::SeqCst);
            self.shared.moved.notify_all();
            return ticket.succeed(ended());
        }
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
            if self.shared.messages.load(Ordering::SeqCst) == MESSAGES {
                drop(interrupted);
                return ticket.succeed(ended());
            }
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

fn start<const EACH: bool>(
    blocks: bool,
    depth: usize,
    shared: &Arc<Shared<EACH>>,
) -> Arc<Engine<Model<EACH>>> {
    let driver = Model {
        shared: shared.clone(),
        blocks,
    };
    let rules = Rules {
        depth,
        grace: Duration::from_secs(3600),
        gives_up: false,
    };
    Engine::start("ox-model", PLACE, rules, driver).unwrap()
}

fn submit<const EACH: bool>(
    engine: &Arc<Engine<Model<EACH>>>,
    number: u32,
    told: &Arc<Told>,
    here: bool,
) -> bool {
    let deadline = deadline_in(Duration::from_secs(3600));
    let job = Nothing {
        message: EACH && number % 2 == 1,
    };
    let submitted = match here {
        true => engine.submit_here(job, label(), deadline),
        false => engine.submit(job, label(), deadline),
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
fn answer<const EACH: bool>(shared: &Shared<EACH>) {
    let ticket = shared.out.lock().unwrap().pop();
    if let Some(ticket) = ticket {
        ticket.succeed(ended());
    }
}

fn ended() -> Completion {
    Completion {
        tensors: Vec::new(),
        source: None,
        contributors: 0,
    }
}

fn check<const EACH: bool>(told: &Told, accepted: &[bool], shared: &Shared<EACH>, failed: bool) {
    let told = told.0.lock().unwrap().clone();
    let mut numbers: Vec<u32> = told.iter().map(|(n, _)| *n).collect();
    numbers.sort_unstable();
    let wanted: Vec<u32> = (0u32..)
        .zip(accepted)
        .filter(|(_, a)| **a)
        .map(|(n, _)| n)
        .collect();
    assert_eq!(numbers, wanted, "each accepted operation is told once");
    // A message is ordered with nothing, and may be told before a caller listens for that.
    let told: Vec<_> = told.into_iter().filter(|(n, _)| !(EACH && *n % 2 == 1)).collect();
    let good = told.iter().filter(|(_, good)| *good).map(|(n, _)| *n);
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

/// Every thread of the engine ends: none waits for what has been.
fn gone<const EACH: bool>(engine: &Arc<Engine<Model<EACH>>>) {
    while Arc::strong_count(engine) > 1 {
        thread::yield_now();
    }
}

fn race<const EACH: bool>(blocks: bool, depth: usize, aborts: bool) {
    let shared = Arc::new(Shared::<EACH>::default());
    let told = Arc::new(Told::default());
    let engine = start(blocks, depth, &shared);
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
    gone(&engine);
    let failed = engine.error().is_some();
    check(&told, &accepted, &shared, failed);
}

#[test]
fn submitting_answering_and_aborting_at_once_tells_each_caller_once_and_in_order() {
    under_every_schedule(|| race::<false>(false, usize::MAX, true));
    under_every_schedule(|| race::<true>(false, 1, true));
}

#[test]
fn submitting_and_leaving_at_once_loses_no_operation_and_no_wake_up() {
    under_every_schedule(|| race::<false>(false, usize::MAX, false));
    under_every_schedule(|| race::<true>(false, 1, false));
}

#[test]
fn an_abort_ends_a_call_that_blocks_and_what_waits_behind_it() {
    under_every_schedule(|| race::<false>(true, 1, true));
}

/// What is pending is answered while the group drains.
fn drained<const EACH: bool>(depth: usize) {
    let shared = Arc::new(Shared::<EACH>::default());
    let told = Arc::new(Told::default());
    let engine = start(false, depth, &shared);
    let accepted: Vec<bool> = (0..3).map(|n| submit(&engine, n, &told, false)).collect();
    let theirs = shared.clone();
    let answering = thread::spawn(move || {
        for _ in 0..3 {
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
    gone(&engine);
    check(&told, &accepted, &shared, false);
    assert_eq!(shared.releases.load(Ordering::SeqCst), 1);
    assert!(!submit(&engine, 4, &told, false), "accepted after the drain");
}

#[test]
fn a_drain_lets_what_is_pending_end_and_releases_the_driver_once() {
    under_every_schedule(|| drained::<false>(usize::MAX));
}

#[test]
fn an_answer_wakes_the_executor_whose_turn_it_makes() {
    under_every_schedule(|| drained::<false>(1));
    under_every_schedule(|| drained::<true>(1));
}

#[test]
fn a_message_wakes_the_executor_of_its_channel_beside_a_call_that_waits_for_it() {
    under_every_schedule(|| {
        let shared = Arc::new(Shared::<true>::default());
        let told = Arc::new(Told::default());
        let engine = start(true, 1, &shared);
        let accepted: Vec<bool> = (0..4)
            .map(|n| n != 2 && submit(&engine, n, &told, false))
            .collect();
        engine.drain(deadline_in(Duration::from_secs(3600))).unwrap();
        gone(&engine);
        check(&told, &accepted, &shared, false);
    });
}

//! The watchdog: one thread per configuration that ends flights, notices deadlines and asynchronous errors, and cleans up after a
//! failure. It reports and aborts the group; it never ends the process (L36).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ftcore::{Error, Event, deadline_in, time_left};

use crate::cuda::event::CudaEvent;
use crate::engine::Engine;
use crate::flight::Flight;
use crate::threads;

/// How often the communicators are asked how they are.
const CHECK: Duration = Duration::from_millis(5);
/// After a failure: how long the device gets to let go of the memory before it counts as in use (INV-2 leaves 100 ms in all).
const GRACE: Duration = Duration::from_millis(80);
/// As above, until the aborting thread runs at all: on a machine with more threads than cores that alone takes a while.
const START: Duration = Duration::from_millis(400);
/// As above: how often is looked in that time where nothing else runs. A machine that lets this thread wait for its turns lets the library
/// wait for its own, so that the grace goes on (at most by [`START`]) until it has had so many.
const LOOKS: u32 = 150;
/// How long an idle communicator gets to flush before it is aborted.
const PATIENCE: Duration = Duration::from_secs(10);

/// The thread's life.
pub(crate) fn run(engine: &Arc<Engine>) {
    // Without the device nothing can be watched; its first use in `watch` reports that.
    let _inside = engine.gpu.enter();
    if watch(engine) {
        engine.end(true);
        // Nobody waits for an idle communicator longer than for work on it.
        let patience = PATIENCE.min(engine.settings.timeout);
        engine.comm.retire(patience);
        engine.lanes.retire(patience);
    } else {
        let end = fail_all(engine);
        engine.end(false);
        let cause = engine
            .failure()
            .unwrap_or_else(|| Error::timeout("the group ended"));
        // Submissions that slipped in while this ended are failed, too.
        while engine.is_pending() {
            engine
                .take_flights()
                .iter()
                .for_each(|f| f.fail(&cause, &engine.gpu, end == End::Over, false));
        }
        if end == End::Owed {
            engine.is_through();
            // Nobody waits for this thread any more.
            engine.comm.abort();
            engine.lanes.abort();
        }
    }
    engine.is_through();
}

/// Whether the library has let go of what a failed engine gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Over,
    /// Not in time.
    Open,
    /// It was not told to, because no thread started that could do it.
    Owed,
}

/// Ends flights until the engine has failed (false) or is to quit and idle (true).
fn watch(engine: &Arc<Engine>) -> bool {
    let mut idle = 0u32;
    let mut checked = Instant::now();
    loop {
        let (flights, failure, quit) = engine.snapshot();
        if failure.is_some() {
            // A group that was left keeps nobody; one that is only poisoned keeps its engine until it is left.
            return false;
        }
        if flights.is_empty() && quit {
            return true;
        }
        match end_reached(engine, &flights) {
            Ok(0) => idle = idle.saturating_add(1),
            Ok(_) => idle = 0,
            Err(error) => engine.fail(error),
        }
        for flight in &flights {
            if Instant::now() >= flight.deadline
                && engine.snapshot().0.iter().any(|f| Arc::ptr_eq(f, flight))
                && !flight.reached().unwrap_or(false)
                && let Some(error) = engine.overdue(flight)
            {
                // The group fails with the operation's name on the cause.
                engine.fail(flight.label.name(error));
            }
        }
        if checked.elapsed() >= CHECK {
            checked = Instant::now();
            if let Err(error) = engine.comm.state() {
                engine.fail(error);
            }
            if let Err(error) = engine.lanes.check() {
                engine.fail(error);
            }
        }
        let pause = match (flights.is_empty(), idle) {
            (true, _) => CHECK * 4,
            (false, 0..=20) => {
                std::thread::yield_now();
                continue;
            }
            (false, 21..=60) => Duration::from_micros(20),
            (false, _) => Duration::from_micros(150),
        };
        if flights.is_empty() {
            idle = 0;
            engine.rest(pause);
        } else {
            std::thread::sleep(pause);
        }
    }
}

/// Ends what the device has finished; how many there were.
fn end_reached(engine: &Arc<Engine>, flights: &[Arc<Flight>]) -> Result<usize, Error> {
    let mut ended = 0;
    let mut blocked = false;
    for flight in flights {
        // What comes behind an unfinished operation of the one stream is not finished either.
        if flight.in_order && blocked {
            continue;
        }
        if flight.reached()? {
            engine.finish(flight);
            ended += 1;
        } else if flight.in_order {
            blocked = true;
        }
    }
    Ok(ended)
}

/// Aborts the communicators on a thread that is given up if it does not return, and ends all flights with the cause.
fn fail_all(engine: &Arc<Engine>) -> End {
    let cause = engine
        .failure()
        .unwrap_or_else(|| Error::timeout("the group ended"));
    tracing::warn!(rank = engine.place.rank, epoch = engine.place.epoch, %cause, "a group has failed");
    let aborted = Arc::new(AtomicBool::new(false));
    let begun = Arc::new(OnceLock::new());
    let (this, flag, began) = (engine.clone(), aborted.clone(), begun.clone());
    let started = threads::start("ox-nccl-abort", move || {
        let _ = began.set(Instant::now());
        let _inside = this.gpu.enter();
        this.comm.abort();
        this.lanes.abort();
        flag.store(true, Ordering::Release);
    });
    if let Err(error) = &started {
        tracing::warn!(%error, "a communicator is aborted only after its work was given up");
    }
    let latest = deadline_in(if started.is_ok() { START } else { Duration::ZERO });
    let is_over = |more: Duration| {
        let until = begun
            .get()
            .map_or(latest, |began: &Instant| *began + GRACE + more);
        time_left(until).is_zero()
    };
    let mut looks = 0;
    let quiet = engine.quiesce(deadline_in(GRACE));
    let mut pending = engine.take_flights();
    // Behind everything that was enqueued before the abort, even by calls that failed half way.
    let mut last: Option<Arc<CudaEvent>> = None;
    let mut drained = false;
    while !pending.is_empty() && (!is_over(Duration::ZERO) || (looks < LOOKS && !is_over(START))) {
        looks += 1;
        // Nothing is given back before the library has let go, even if its events say that it is done.
        if aborted.load(Ordering::Acquire) {
            if last.is_none() {
                last = CudaEvent::record(&engine.gpu, engine.stream.handle()).ok();
            }
            drained = quiet && last.as_ref().is_some_and(|e| e.query().unwrap_or(false));
            pending.retain(|flight| {
                let free = flight.is_free(drained);
                if free {
                    flight.fail(&cause, &engine.gpu, true, drained);
                }
                !free
            });
        }
        std::thread::sleep(Duration::from_micros(300));
        pending.extend(engine.take_flights());
    }
    let ended = aborted.load(Ordering::Acquire);
    pending
        .iter()
        .for_each(|flight| flight.fail(&cause, &engine.gpu, ended, drained));
    match (ended, started) {
        (true, _) => End::Over,
        (false, Ok(())) => End::Open,
        (false, Err(_)) => End::Owed,
    }
}

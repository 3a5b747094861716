//! The engine around small drivers: what is in flight on a device when the group fails, channels that block, and deadlines.

use std::any::Any;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::{Driver, Ended, Engine, Held, InFlight, Job, Label, Place, Rules, Ticket, spawn};
use crate::float_mode::foreign;
use crate::{
    Collective, Completion, DType, Epoch, Error, Event, Result, Status, Tensor, Work, deadline_in,
    leaked_bytes, lifecycle,
};

const LONG: Duration = Duration::from_secs(60);
const PLACE: Place = Place {
    rank: 0,
    world: 2,
    epoch: Epoch(1),
};

impl Job for Collective {
    fn into_op(self) -> Collective {
        self
    }
}

fn start<D: Driver>(driver: D) -> Arc<Engine<D>> {
    let rules = Rules {
        depth: 1,
        grace: LONG,
        gives_up: false,
    };
    Engine::start("ox-test", PLACE, rules, driver).unwrap()
}

fn submit<D: Driver<Job = Collective>>(engine: &Arc<Engine<D>>, op: Collective) -> Work {
    let label = Label::of(&op);
    engine.submit(op, label, deadline_in(LONG)).unwrap()
}

/// It is reached, but who asks is told only when the test lets it: the library's call takes its time.
struct Slow {
    asked: Sender<()>,
    answer: Mutex<Receiver<()>>,
}

impl Event for Slow {
    fn query(&self) -> Result<bool> {
        let _ = self.asked.send(());
        let _ = self.answer.lock().unwrap().recv_timeout(LONG);
        Ok(true)
    }
    fn synchronize(&self, _: Instant) -> Result<()> {
        Ok(())
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct OnDevice {
    in_flight: Arc<InFlight<Self>>,
    done: Arc<dyn Event>,
    ended: Sender<Ended<Self>>,
}

impl Driver for OnDevice {
    type Job = Collective;

    fn enqueue(&self, op: Collective, ticket: Ticket<Self>) {
        self.in_flight
            .add(Held::new(op, "a test"), self.done.clone(), ticket);
    }

    fn interrupt(&self, _: &Error, ended: Ended<Self>) {
        self.in_flight.stop();
        let _ = self.ended.send(ended);
    }

    fn release(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn inv8_what_the_watch_sees_after_a_failure_gives_no_memory_back_before_the_library_has_given_up() {
    let (asked, asks) = channel();
    let (answers, answer) = channel();
    let (watch, watching) = channel::<()>();
    let ask = move || {
        let _ = &watch;
        None
    };
    let in_flight = Arc::new(InFlight::start("ox-watch", ask).unwrap());
    let (ended, ends) = channel();
    let engine = start(OnDevice {
        in_flight: in_flight.clone(),
        done: Arc::new(Slow {
            asked,
            answer: Mutex::new(answer),
        }),
        ended,
    });
    let tensor = Tensor::from_vec(vec![7u8; 3]);
    let work = submit(
        &engine,
        Collective::Broadcast {
            tensors: vec![tensor],
            root: 0,
        },
    );
    asks.recv_timeout(LONG).unwrap();
    engine.fail(Error::timeout("a peer"));
    answers.send(()).unwrap();
    // Then nothing is to come of it any more.
    assert_eq!(
        watching.recv_timeout(LONG / 4),
        Err(RecvTimeoutError::Disconnected)
    );
    assert!(matches!(work.status(), Status::Pending), "{:?}", work.status());
    drop(answers);
    in_flight.settle(Ok(()), None, deadline_in(LONG)).unwrap();
    ends.recv_timeout(LONG).unwrap().clean();
    work.wait(deadline_in(LONG)).unwrap_err();
    assert_eq!(work.recover()[0].as_slice::<u8>().unwrap(), [7; 3]);
}

/// It is not reached.
struct Never;

impl Event for Never {
    fn query(&self) -> Result<bool> {
        Ok(false)
    }
    fn synchronize(&self, _: Instant) -> Result<()> {
        Err(Error::timeout("it is never reached"))
    }
    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn what_another_rank_has_said_is_the_cause_and_what_the_library_reports_only_where_none_has() {
    for said in [true, false] {
        let (asked, asks) = channel();
        let ask = move || {
            let _ = asked.send(());
            Some(Error::timeout("the library"))
        };
        let in_flight = Arc::new(InFlight::start("ox-watch", ask).unwrap());
        let (ended, ends) = channel();
        let engine = start(OnDevice {
            in_flight: in_flight.clone(),
            done: Arc::new(Never),
            ended,
        });
        let _work = submit(&engine, Collective::Barrier);
        asks.recv_timeout(LONG).unwrap();
        if said {
            engine.fail(Error::timeout("a peer"));
        }
        ends.recv_timeout(LONG).unwrap().clean();
        let cause = lifecycle::Engine::error(&*engine).unwrap();
        assert_eq!(cause.message(), if said { "a peer" } else { "the library" });
    }
}

#[test]
fn inv8_suspect_memory_counts_as_leaked_until_it_is_free_and_once_if_it_never_is() {
    // Much more than other tests of this process leak meanwhile. Its pages are never touched.
    const BYTES: u64 = 1 << 28;
    let held = || {
        let tensors = vec![Tensor::zeros(DType::U8, BYTES as usize)];
        Held::new(Collective::Broadcast { tensors, root: 0 }, "a test")
    };
    let before = leaked_bytes();
    let more = || (leaked_bytes() - before) / BYTES;
    let (mut freed, mut lost) = (held(), held());
    assert_eq!(more(), 0);
    for _ in 0..2 {
        freed.suspect();
        lost.suspect();
        assert_eq!(more(), 2);
    }
    assert_eq!(freed.free().len(), 1);
    assert_eq!(more(), 1);
    drop(lost);
    assert_eq!(more(), 1);
}

/// Every operation lasts until all are under way.
struct Meeting(Arc<(Mutex<usize>, Condvar)>, usize);

impl Driver for Meeting {
    type Job = Collective;
    const BLOCKS: bool = true;

    fn enqueue(&self, op: Collective, ticket: Ticket<Self>) {
        let (here, changed) = &*self.0;
        let mut count = here.lock().unwrap();
        *count += 1;
        changed.notify_all();
        let (count, waited) = changed
            .wait_timeout_while(count, LONG / 4, |n| *n < self.1)
            .unwrap();
        drop(count);
        match waited.timed_out() {
            true => ticket.refuse(Error::timeout("it is alone"), op.into_tensors()),
            false => ticket.succeed(Completion {
                tensors: op.into_tensors(),
                source: None,
                contributors: 0,
            }),
        }
    }

    fn interrupt(&self, _: &Error, ended: Ended<Self>) {
        ended.clean();
    }

    fn release(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn no_channel_of_a_driver_that_blocks_waits_for_another() {
    let recv = |peer, tag| Collective::Recv {
        tensor: Tensor::from_vec(vec![0u8]),
        peer,
        tag,
    };
    let ops = [
        recv(Some(1), 0),
        recv(Some(1), 1),
        recv(None, 0),
        Collective::Barrier,
    ];
    let engine = start(Meeting(Arc::default(), ops.len()));
    let works = ops.map(|op| submit(&engine, op));
    for work in works {
        work.wait(deadline_in(LONG)).unwrap();
    }
}

#[test]
fn the_others_of_a_monitored_barrier_wait_for_rank_0_beyond_its_deadline() {
    let deadline = deadline_in(LONG);
    let due = |rank, op: &Collective| Place { rank, ..PLACE }.due(&Label::of(op), deadline) - deadline;
    let monitored = Collective::MonitoredBarrier { wait_all: true };
    assert_eq!(due(0, &monitored), Duration::ZERO);
    assert_eq!(due(1, &monitored), Duration::from_secs(1));
    assert_eq!(due(1, &Collective::Barrier), Duration::ZERO);
}

/// Keeps what it gets, whatever is asked of it.
struct Keeps(Mutex<Vec<Ticket<Self>>>);

impl Driver for Keeps {
    type Job = Collective;
    const OVERTIME: Duration = Duration::from_secs(20);

    fn enqueue(&self, _: Collective, ticket: Ticket<Self>) {
        self.0.lock().unwrap().push(ticket);
    }
    fn interrupt(&self, _: &Error, _: Ended<Self>) {}
    fn release(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_caller_waits_for_what_the_engine_says_of_an_operation_that_its_driver_keeps() {
    let rules = Rules {
        depth: 1,
        grace: Duration::from_millis(100),
        gives_up: false,
    };
    let engine = Engine::start("ox-test", PLACE, rules, Keeps(Mutex::default())).unwrap();
    // All but the grace is over when the driver gets it, which is on this thread.
    let deadline = Instant::now() - Keeps::OVERTIME;
    let label = Label::of(&Collective::Barrier);
    let work = engine.submit_here(Collective::Barrier, label, deadline);
    let error = work.unwrap().take().unwrap_err();
    assert!(
        error.to_string().contains("not finished at its deadline"),
        "{error}"
    );
    assert_eq!(
        (error.context().rank, error.context().epoch),
        (Some(0), Some(PLACE.epoch))
    );
    let kept = std::mem::take(&mut *engine.driver().0.lock().unwrap());
    drop(kept);
}

/// The smallest float, or nothing where those are flushed.
#[inline(never)]
fn smallest() -> u32 {
    let smallest = std::hint::black_box(f32::from_bits(1));
    (smallest * std::hint::black_box(1.0)).to_bits()
}

#[test]
fn a_thread_of_an_engine_computes_as_all_do_however_its_maker_flushes_and_rounds() {
    for mode in foreign::MODES {
        let (tell, told) = channel();
        let body = move || tell.send(smallest()).unwrap();
        foreign::with(mode, || spawn("ox-test", body)).unwrap();
        assert_eq!(told.recv_timeout(LONG), Ok(1));
    }
}

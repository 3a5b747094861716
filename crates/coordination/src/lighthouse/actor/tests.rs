//! What the task answers, when, and whom it takes for dead.

use std::sync::Mutex;

use ftcore::{Epoch, Step};
use protocol::quorum::{QuorumRules, Record, Start};

use super::super::reply::Part;
use super::*;
use crate::unchanged::Held;

/// A stand-in for the record's place: what was asked of it, and when it refuses.
#[derive(Debug, Default)]
pub(crate) struct Script {
    asked: Mutex<Vec<&'static str>>,
    lost: std::sync::atomic::AtomicBool,
}

impl Script {
    fn note(&self, what: &'static str) -> Result<()> {
        self.asked.lock().unwrap().push(what);
        if self.lost.load(Ordering::Relaxed) {
            return Err(Error::new(
                ErrorKind::Conflict,
                "another lighthouse leads the job",
            ));
        }
        Ok(())
    }

    pub(crate) fn save(&self, _: &Record) -> Result<()> {
        self.note("save")
    }

    pub(crate) fn confirm(&self) -> Result<()> {
        self.note("confirm")
    }
}

fn actor(min_replicas: usize, journal: Journal, start: Instant) -> Actor {
    let rules = QuorumRules {
        min_replicas,
        initial_replicas: None,
        join_timeout: Duration::from_secs(60),
        heartbeat_timeout: TIMEOUT,
    };
    Actor {
        state: LighthouseState::new(rules, Start::default(), start),
        journal,
        over: None,
        delivered: Epoch(0),
        put_off: None,
        calls: HashMap::new(),
        shelf: Shelf::default(),
        watched: Arc::default(),
        rates: Rates::default(),
        streams: HashMap::new(),
        operators: HashMap::new(),
        counters: Counters::default(),
        now: start,
        away_after: Duration::from_secs(60),
        heartbeat_timeout: TIMEOUT,
        callers: Callers::default(),
        discounted_until: None,
    }
}

fn join(id: &str, step: i64, ticket: Ticket) -> (Message, oneshot::Receiver<Result<Reply>>) {
    let (reply, answer) = oneshot::channel();
    let member = Member {
        replica_id: id.into(),
        address: format!("http://{id}:1"),
        store_address: format!("{id}:2"),
        world_size: 1,
        step: Step(step),
        ..Member::default()
    };
    let message = Message::Join {
        member: Box::new(member),
        caller: Caller::default(),
        unanswered: false,
        ticket,
        reply,
    };
    (message, answer)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(future)
}

#[test]
fn nothing_is_answered_before_the_journal_allows_it_and_nothing_at_all_afterwards() {
    let script = Arc::new(Script::default());
    let asked = || std::mem::take(&mut *script.asked.lock().unwrap());
    let now = Instant::now();
    let mut actor = actor(1, Journal::Scripted(script.clone()), now);
    // A new epoch is saved, which is confirmation enough.
    let (message, mut answer) = join("a", 0, 1);
    block_on(actor.take(now, message));
    assert_eq!(asked(), ["save"]);
    assert!(matches!(answer.try_recv(), Ok(Ok(_))));
    // The next step of the same epoch saves nothing, and is confirmed all the same.
    let (message, mut answer) = join("a", 1, 2);
    block_on(actor.take(now, message));
    assert_eq!(asked(), ["confirm"]);
    assert!(matches!(answer.try_recv(), Ok(Ok(_))));
    // What another lighthouse would decide otherwise is not said either: the refusal of a state that does not descend from the record.
    script.lost.store(true, Ordering::Relaxed);
    let (message, mut answer) = join("b", 99, 3);
    block_on(actor.take(now, message));
    assert_eq!(asked(), ["confirm"]);
    assert!(answer.try_recv().is_err(), "an answer was given");
    assert!(actor.over.is_some());
    let (message, mut answer) = join("a", 2, 4);
    block_on(actor.take(now, message));
    assert_eq!(asked(), [""; 0]);
    assert!(answer.try_recv().is_err(), "an answer was given");
}

#[test]
fn a_task_whose_journal_refuses_ends_and_its_calls_with_it() {
    let script = Arc::new(Script::default());
    script.lost.store(true, Ordering::Relaxed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .build()
        .unwrap();
    runtime.block_on(async {
        let rules = QuorumRules {
            min_replicas: 1,
            initial_replicas: None,
            join_timeout: Duration::from_secs(60),
            heartbeat_timeout: TIMEOUT,
        };
        let state = LighthouseState::new(rules, Start::default(), Instant::now());
        let (lighthouse, task) = start(
            state,
            Duration::from_secs(3600),
            Duration::from_secs(3600),
            TIMEOUT,
            Journal::Scripted(script),
        );
        let (message, answer) = join("a", 0, 1);
        lighthouse.send(message);
        let why = tokio::time::timeout(Duration::from_secs(30), task)
            .await
            .expect("it goes on");
        assert_eq!(why.unwrap().kind(), ErrorKind::Conflict);
        assert!(answer.await.is_err(), "an answer was given");
        let leave = Event::Leave {
            replica_id: "a".into(),
            reason: String::new(),
        };
        let told = lighthouse.tell(leave).await;
        assert_eq!(told.unwrap_err().kind(), ErrorKind::Unavailable);
    });
}

/// Joins of all replicas of a job, in another order than that of their ids, and one that is far behind and waits as a spare.
#[test]
fn each_replica_of_a_large_job_gets_its_own_place_for_every_step_and_nobody_is_falsely_dead() {
    const N: usize = 512;
    let start = Instant::now();
    let mut actor = actor(N, Journal::Nowhere, start);
    let id = |i: usize| format!("replica_{i:05}");
    let mut held: Vec<Held> = (0..=N).map(|_| Held::default()).collect();
    let mut epochs = std::collections::BTreeSet::new();
    let mut ticket = 0;
    for step in 1..=3 {
        let mut answers = Vec::new();
        // The first quorum is without the last one, which comes as a spare of the second.
        let comes = |i: usize| i < N || step == 2;
        let order = (0..=N).map(|i| (i * 389) % (N + 1)).filter(|i| comes(*i));
        // It asks before the others have all come.
        for i in std::iter::once(N)
            .filter(|_| step == 2)
            .chain(order.filter(|i| *i < N))
        {
            ticket += 1;
            let (mut message, answer) = join(&id(i), if i == N { 0 } else { step }, ticket);
            if let Message::Join { member, caller, .. } = &mut message {
                member.joining = protocol::Joining::Outside;
                caller.held = held[i].list(true);
                caller.part = Some(Part {
                    init_sync: true,
                    ranks: 1,
                });
            }
            block_on(actor.take(start, message));
            answers.push((i, answer));
        }
        for (i, mut answer) in answers {
            let reply = answer
                .try_recv()
                .unwrap_or_else(|e| panic!("step {step}: {} has no answer: {e}", id(i)));
            let response = prost::Message::decode(reply.unwrap().message()).unwrap();
            let told = held[i].take_in(response, true).unwrap();
            assert!(matches!(told, protocol::Told::Parts(_)), "step {step}");
            let place = told.place(&id(i), 0, true).unwrap();
            epochs.insert(place.quorum_id);
            assert_eq!((place.replica_world_size as usize, place.max_step.0), (N, step));
            assert_eq!(place.spare, i == N);
            if i < N {
                assert_eq!(
                    (place.replica_rank as usize, place.heal),
                    (i, false),
                    "step {step}"
                );
            } else {
                assert!(
                    place
                        .recover_sources
                        .iter()
                        .all(|s| s.replica_id == id(s.replica_rank as usize))
                );
                assert_eq!(place.recover_sources.len(), 3);
            }
        }
    }
    assert_eq!(epochs.len(), 1, "no member was left out");
}

const TIMEOUT: Duration = Duration::from_millis(300);

#[test]
fn what_waits_in_the_queue_of_a_busy_lighthouse_is_not_silence() {
    let start = Instant::now();
    let mut actor = actor(2, Journal::Nowhere, start);
    let event = |event| Message::Event { event, done: None };
    let beat = |id: &str| {
        event(Event::Heartbeat {
            replica_id: id.into(),
        })
    };
    let mut queue = Vec::new();
    let mut answers = Vec::new();
    for (ticket, id) in (1..).zip(["a", "b"]) {
        let (message, answer) = join(id, 0, ticket);
        queue.push(message);
        answers.push(answer);
    }
    queue.extend([
        event(Event::Tick),
        event(Event::Tick),
        event(Event::Tick),
        beat("a"),
        beat("b"),
    ]);
    // All of it came within a few milliseconds, and this task takes longer for it than a replica may be silent.
    for (ms, message) in (0..).zip(queue) {
        block_on(actor.take(start + Duration::from_millis(ms), message));
        std::thread::sleep(TIMEOUT / 2);
    }
    assert!(answers.iter_mut().all(|a| matches!(a.try_recv(), Ok(Ok(_)))));
    let status = actor.state.status(actor.now);
    assert_eq!((status.healthy.len(), status.aborted), (2, None));
    // One that says nothing is found all the same.
    block_on(actor.take(start + TIMEOUT, beat("a")));
    block_on(actor.take(start + TIMEOUT + Duration::from_millis(50), event(Event::Tick)));
    let status = actor.state.status(actor.now);
    let healthy: Vec<&str> = status.healthy.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(healthy, ["a"]);
    assert!(status.aborted.is_some_and(|why| why.contains("b is gone")));
}

#[test]
fn what_waits_in_a_socket_is_read_before_a_replica_counts_as_silent() {
    let start = Instant::now();
    let mut actor = actor(2, Journal::Nowhere, start);
    let event = |event| Message::Event { event, done: None };
    let beat = |id: &str| {
        event(Event::Heartbeat {
            replica_id: id.into(),
        })
    };
    let lines = ["a", "b"].map(|id| (id, Arc::new(Line::new(None))));
    let mut answers = Vec::new();
    for ((id, line), ticket) in lines.iter().zip(1..) {
        let calling = Message::Calling {
            line: line.number(),
            connection: Arc::downgrade(line),
            replica_id: (*id).into(),
        };
        block_on(actor.take(start, calling));
        let (message, answer) = join(id, 0, ticket);
        block_on(actor.take(start, message));
        answers.push(answer);
    }
    let healthy = |actor: &Actor| actor.state.status(actor.now).healthy.len();
    let mut now = start;
    let mut silence = |actor: &mut Actor| {
        for _ in 0..8 {
            now += TIMEOUT / 4;
            block_on(actor.take(now, beat("a")));
            block_on(actor.take(now, event(Event::Tick)));
        }
        now
    };
    let read = |line: &Line| Message::Read { line: line.number() };
    let is_asked = |line: &Line| {
        let mut asked = std::pin::pin!(line.is_asked());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        asked.as_mut().poll(&mut context).is_ready()
    };
    let b = &lines[1].1;
    // Its heartbeats wait in its socket.
    let now = silence(&mut actor);
    assert_eq!(
        (healthy(&actor), is_asked(b), is_asked(&lines[0].1)),
        (2, true, false)
    );
    block_on(actor.take(now, beat("b")));
    block_on(actor.take(now, read(b)));
    assert_eq!((healthy(&actor), actor.state.status(now).aborted), (2, None));
    // There are none.
    let now = silence(&mut actor);
    assert_eq!((healthy(&actor), is_asked(b)), (2, true));
    block_on(actor.take(now, read(b)));
    assert_eq!(healthy(&actor), 1);
    // A connection that ends while it is being read.
    block_on(actor.take(now, beat("b")));
    let (message, _answer) = join("b", 1, 9);
    block_on(actor.take(now, message));
    assert_eq!(healthy(&actor), 2);
    let now = silence(&mut actor);
    let ended = Message::Ended {
        line: b.number(),
        by_peer: false,
    };
    assert_eq!(healthy(&actor), 2);
    block_on(actor.take(now, ended));
    assert_eq!(healthy(&actor), 1);
}

#[test]
fn a_line_of_the_log_names_sixteen_members_and_counts_the_rest() {
    let quorum = |n: usize| Quorum {
        quorum_id: Epoch(1),
        participants: (0..n)
            .map(|i| Member {
                replica_id: format!("r{i}"),
                ..Member::default()
            })
            .collect(),
        ..Quorum::default()
    };
    assert_eq!(named(&quorum(2)), "r0, r1");
    assert!(named(&quorum(16)).ends_with(", r15"));
    assert!(named(&quorum(4096)).ends_with(", r15 and 4080 more"));
}

//! Sources with different states, and a choice among them that is made together with others.

use std::fmt;
use std::sync::Mutex;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use ftcore::{Epoch, ErrorKind, Result, Step};
use oxccl_checkpoint::{
    CheckpointSource, Fetch, FetchOptions, Fetched, HttpTransport, Reach, Snapshot, SourceChoice, StateDict,
};

type Follow = Box<dyn FnMut(&Reach) -> Option<usize> + Send>;

/// What the others chose, as `follow` plays it; `settle` says yes once `moves` times of no are used up.
struct Played {
    follow: Mutex<Follow>,
    moves: Mutex<usize>,
}

impl fmt::Debug for Played {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Played")
    }
}

impl SourceChoice for Played {
    fn follow(&self, reach: &Reach, _: Instant) -> Result<Option<usize>> {
        Ok((self.follow.lock().unwrap())(reach))
    }

    fn settle(&self, _: &[usize], _: Instant) -> Result<bool> {
        let mut moves = self.moves.lock().unwrap();
        let settled = *moves == 0;
        *moves = moves.saturating_sub(1);
        Ok(settled)
    }
}

fn played(
    moves: usize,
    follow: impl FnMut(&Reach) -> Option<usize> + Send + 'static,
) -> Arc<dyn SourceChoice> {
    Arc::new(Played {
        follow: Mutex::new(Box::new(follow)),
        moves: Mutex::new(moves),
    })
}

/// A large part that all sources share, and one of their own.
fn model(own: f32) -> StateDict {
    let mut state = StateDict::new();
    let values: Vec<f32> = (0..600_000).map(|e| e as f32).collect();
    state.insert_f32("common", &[600_000], &values).unwrap();
    state.insert_f32("own", &[1000], &[own; 1000]).unwrap();
    state
}

fn server() -> HttpTransport {
    HttpTransport::start("127.0.0.1:0", None).unwrap()
}

fn publish(server: &HttpTransport, own: f32) {
    server.publish(Snapshot::new(Step(5), Epoch(9), &model(own)).unwrap());
}

fn fetch(servers: &[&HttpTransport], choice: Arc<dyn SourceChoice>, stall: Duration) -> Result<Fetched> {
    let sources = servers.iter().map(|s| CheckpointSource::at(s.metadata()));
    let mut fetch = Fetch::step(Step(5), sources.collect());
    fetch.choice = Some(choice);
    let options = FetchOptions {
        stall_timeout: stall,
        ..FetchOptions::default()
    };
    fetch.run(Instant::now() + Duration::from_secs(60), &options)
}

const LONG: Duration = Duration::from_secs(30);

#[test]
fn the_source_that_was_chosen_is_waited_for_although_another_one_answers() {
    let (first, chosen) = (server(), Arc::new(server()));
    publish(&first, 1.0);
    let (ask, asked) = mpsc::channel();
    let late = Arc::clone(&chosen);
    let publisher = std::thread::spawn(move || {
        // Only the first source has it by then.
        let have: Vec<usize> = asked.recv().unwrap();
        publish(&late, 2.0);
        have
    });
    let choice = played(0, move |reach| {
        let _ = ask.send(reach.have.clone());
        Some(1)
    });
    let fetched = fetch(&[&first, &chosen], choice, LONG).unwrap();
    assert_eq!(publisher.join().unwrap(), [0]);
    assert_eq!((fetched.state, fetched.followed), (model(2.0), vec![1]));
}

#[test]
fn a_chosen_source_that_does_not_answer_this_rank_is_told_as_lost_and_the_choice_may_move() {
    let (has_it, silent) = (server(), server());
    publish(&has_it, 1.0);
    let choice = played(0, |reach| Some(usize::from(!reach.lost.contains(&1))));
    let fetched = fetch(&[&has_it, &silent], choice, Duration::from_millis(300)).unwrap();
    assert_eq!((fetched.state, fetched.followed), (model(1.0), vec![0]));
}

#[test]
fn a_choice_that_moved_meanwhile_is_followed_and_what_both_states_have_is_kept() {
    let (before, after) = (server(), server());
    publish(&before, 1.0);
    publish(&after, 2.0);
    let asked = Arc::new(Mutex::new(0));
    let count = Arc::clone(&asked);
    let choice = played(1, move |reach| {
        // Once both have answered: first one source, then the other.
        if reach.have.len() < 2 {
            return None;
        }
        let mut n = count.lock().unwrap();
        *n += 1;
        Some(usize::from(*n > 1))
    });
    let fetched = fetch(&[&before, &after], choice, LONG).unwrap();
    assert_eq!((fetched.state, fetched.followed), (model(2.0), vec![1]));
    assert!(fetched.reused_bytes >= 2_400_000, "{}", fetched.reused_bytes);
    assert_eq!(*asked.lock().unwrap(), 2);
}

#[test]
fn a_choice_that_this_rank_cannot_follow_ends_the_fetch_and_names_the_source() {
    let (has_it, gone) = (server(), server());
    publish(&has_it, 1.0);
    let url = gone.metadata();
    drop(gone);
    let sources = vec![
        CheckpointSource::at(has_it.metadata()),
        CheckpointSource::at(url.clone()),
    ];
    let mut fetch = Fetch::step(Step(5), sources);
    fetch.choice = Some(played(0, |_| Some(1)));
    let e = fetch
        .run(Instant::now() + LONG, &FetchOptions::default())
        .unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PeerLost, "{e}");
    assert!(e.message().contains(&url), "{e}");
}

//! The bell's protocol in loom, which runs these threads in every order and with every value that the memory model lets a load return:
//! a fence that is missing is found here, and on no machine that happens to order its stores.

use std::sync::atomic::Ordering;

use loom::sync::atomic::{AtomicU32, AtomicU64, fence};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::word::{AWAKE, ON_THREAD, ON_WORD, Word, arm, disarm, is_armed, ring};

/// The word as one side sees it, with its fence or without.
struct Side<'a, const FENCED: bool>(&'a AtomicU32);

impl<const FENCED: bool> Word for Side<'_, FENCED> {
    fn load(&self, order: Ordering) -> u32 {
        self.0.load(order)
    }
    fn store(&self, value: u32, order: Ordering) {
        self.0.store(value, order);
    }
    fn swap(&self, value: u32, order: Ordering) -> u32 {
        self.0.swap(value, order)
    }
    fn fence(order: Ordering) {
        if FENCED {
            fence(order);
        }
    }
}

/// The word of a bell, and the positions that its ringers publish, as `Writer::publish` and `Reader::release` do.
struct Shared {
    word: AtomicU32,
    positions: [AtomicU64; 2],
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            word: AtomicU32::new(AWAKE),
            positions: std::array::from_fn(|_| AtomicU64::new(0)),
        })
    }

    /// Publishes and rings: how the owner must be woken.
    fn publish<const FENCED: bool>(&self, ringer: usize) -> u32 {
        self.positions[ringer].store(1, Ordering::Release);
        ring(&Side::<FENCED>(&self.word))
    }

    fn arm<const FENCED: bool>(&self) {
        arm(&Side::<FENCED>(&self.word), ON_WORD);
    }

    fn sees(&self, ringer: usize) -> bool {
        self.positions[ringer].load(Ordering::Acquire) == 1
    }
}

/// A thread of the model.
fn ringer<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    thread::Builder::new()
        .name("ox-ringer".to_string())
        .spawn(body)
        .unwrap()
}

/// The owner arms and looks once more while another rank publishes and rings.
fn one_ringer<const OWNER_FENCED: bool, const RINGER_FENCED: bool>() {
    loom::model(|| {
        let shared = Shared::new();
        let ringing = {
            let shared = shared.clone();
            ringer(move || shared.publish::<RINGER_FENCED>(0))
        };
        shared.arm::<OWNER_FENCED>();
        let seen = shared.sees(0);
        let rung = ringing.join().unwrap();
        assert!(seen || rung == ON_WORD, "the owner sleeps and is not woken");
        // A futex does not sleep on a word that has changed.
        let awake = shared.word.load(Ordering::Relaxed) == AWAKE;
        assert_eq!(awake, rung == ON_WORD);
    });
}

#[test]
fn whoever_arms_sees_what_was_written_or_is_rung_for() {
    one_ringer::<true, true>();
}

#[test]
fn without_the_fence_of_either_side_a_wake_up_is_lost() {
    for broken in [one_ringer::<false, true>, one_ringer::<true, false>] {
        let failed = std::panic::catch_unwind(broken).unwrap_err();
        let text = failed.downcast_ref::<&str>().copied();
        assert_eq!(text, Some("the owner sleeps and is not woken"));
    }
}

#[test]
fn of_two_ringers_one_wakes_and_none_is_missed() {
    loom::model(|| {
        let shared = Shared::new();
        let ringers: Vec<_> = (0..2)
            .map(|number| {
                let shared = shared.clone();
                ringer(move || shared.publish::<true>(number))
            })
            .collect();
        shared.arm::<true>();
        let seen = [shared.sees(0), shared.sees(1)];
        let rung: Vec<u32> = ringers.into_iter().map(|r| r.join().unwrap()).collect();
        let wakes = rung.iter().filter(|how| **how == ON_WORD).count();
        assert!(wakes <= 1, "{rung:?}");
        assert!(
            wakes == 1 || seen == [true, true],
            "{seen:?}: a ringer saw a sleeper and left it"
        );
    });
}

#[test]
fn who_does_not_sleep_after_all_is_rung_for_when_it_arms_again() {
    loom::model(|| {
        let shared = Shared::new();
        let ringing = {
            let shared = shared.clone();
            ringer(move || shared.publish::<true>(0))
        };
        // Something else was there: no sleep, and a ring that comes now wakes no thread.
        shared.arm::<true>();
        disarm(&Side::<true>(&shared.word));
        shared.arm::<true>();
        let seen = shared.sees(0);
        let armed = shared.word.load(Ordering::Relaxed) == ON_WORD;
        let rung = ringing.join().unwrap();
        assert!(
            seen || !armed || rung == ON_WORD,
            "the owner sleeps and is not woken"
        );
    });
}

#[test]
fn a_thread_that_counts_its_bell_before_it_arms_does_not_sleep_through_a_ring() {
    loom::model(|| {
        let shared = Shared::new();
        let bell = Arc::new(AtomicU32::new(0));
        let ringing = {
            let (shared, bell) = (shared.clone(), bell.clone());
            ringer(move || {
                if shared.publish::<true>(0) == ON_THREAD {
                    bell.fetch_add(1, Ordering::SeqCst);
                }
            })
        };
        let counted = bell.load(Ordering::SeqCst);
        arm(&Side::<true>(&shared.word), ON_THREAD);
        let seen = shared.sees(0);
        ringing.join().unwrap();
        let rung = bell.load(Ordering::SeqCst) != counted;
        assert!(seen || rung, "the thread sleeps and is not woken");
    });
}

/// A thread arms for the engine's, looks, and puts what it drove where that thread finds it. True if it looks whether it was rung for meanwhile.
fn parks<const LOOKS_AGAIN: bool>() {
    loom::model(|| {
        let shared = Shared::new();
        let parked = Arc::new(Mutex::new(false));
        let engine = {
            let (shared, parked) = (shared.clone(), parked.clone());
            // The peer, and the thread that it wakes.
            ringer(move || shared.publish::<true>(0) == ON_THREAD && *parked.lock().unwrap())
        };
        arm(&Side::<true>(&shared.word), ON_THREAD);
        let seen = shared.sees(0);
        let rung = {
            let mut parked = parked.lock().unwrap();
            *parked = true;
            !is_armed(&Side::<true>(&shared.word))
        };
        let taken = engine.join().unwrap();
        let driven = seen || taken || (LOOKS_AGAIN && rung);
        assert!(driven, "what is parked has no driver");
    });
}

#[test]
fn what_was_rung_for_before_it_was_parked_is_driven() {
    parks::<true>();
    let failed = std::panic::catch_unwind(parks::<false>).unwrap_err();
    assert_eq!(
        failed.downcast_ref::<&str>().copied(),
        Some("what is parked has no driver")
    );
}

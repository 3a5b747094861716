//! Work that waits for room: so many things side by side, some of which take more room than others.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use anyhow::{Context, Result, anyhow};

/// What a worker that panicked left behind is still whole: counts are added in one step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What waits for a worker, and how much room there is for it.
struct Waiting<T> {
    items: Vec<(T, usize)>,
    free: usize,
}

/// Room that one item takes, given back also if its work panics.
struct Taken<'a, T> {
    from: &'a (Mutex<Waiting<T>>, Condvar),
    places: usize,
}

impl<T> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        lock(&self.from.0).free += self.places;
        self.from.1.notify_all();
    }
}

/// Does `body` for each of `items`, in their order but for those that there is no room for yet. Each has so many of the `places`, at most all.
///
/// # Errors
/// If a thread cannot be started or panics; the others still do all that is left.
pub(crate) fn in_workers<T: Send>(
    items: Vec<(T, usize)>,
    places: usize,
    body: impl Fn(T) + Sync,
) -> Result<()> {
    let workers = places.min(items.len());
    let waiting = (Mutex::new(Waiting { items, free: places }), Condvar::new());
    let take = || {
        let mut state = lock(&waiting.0);
        while !state.items.is_empty() {
            let free = state.free;
            if let Some(first) = state.items.iter().position(|(_, own)| *own <= free) {
                let (item, own) = state.items.remove(first);
                state.free -= own;
                let taken = Taken {
                    from: &waiting,
                    places: own,
                };
                return Some((item, taken));
            }
            state = waiting.1.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        None
    };
    let worker = || {
        while let Some((item, _taken)) = take() {
            body(item);
        }
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                thread::Builder::new()
                    .name("ox-worker".to_owned())
                    .spawn_scoped(scope, worker)
            })
            .collect();
        let mut outcome = Ok(());
        for started in threads {
            let ended = match started.map(thread::ScopedJoinHandle::join) {
                Ok(Ok(())) => Ok(()),
                Ok(Err(_)) => Err(anyhow!("a thread that ran rows panicked")),
                Err(e) => Err(e).context("no thread to run rows in"),
            };
            outcome = outcome.and(ended);
        }
        outcome
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn lanes_do_everything_once_and_so_many_at_once() {
        let items: Vec<(usize, usize)> = (0..40).map(|item| (item, 1)).collect();
        for workers in [1, 3] {
            let (inside, most, done) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
            // None leaves before as many are inside as there may be: with fewer workers this would time out.
            let until = Instant::now() + Duration::from_secs(60);
            in_workers(items.clone(), workers, |item| {
                most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                while most.load(Ordering::SeqCst) < workers && Instant::now() < until {
                    thread::yield_now();
                }
                inside.fetch_sub(1, Ordering::SeqCst);
                lock(&done).push(item);
            })
            .unwrap();
            assert_eq!(most.into_inner(), workers);
            let mut done = done.into_inner().unwrap();
            if workers > 1 {
                done.sort_unstable();
            }
            assert!(done.into_iter().eq(0..40));
        }
    }

    #[test]
    fn what_takes_two_places_has_them_and_what_fits_beside_it_goes_before_what_does_not() {
        let items = vec![("two", 2), ("two again", 2), ("one", 1), ("another", 1)];
        let (inside, most, begun) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(Vec::new()));
        let sizes = items.clone();
        in_workers(items, 3, |name| {
            let own = sizes.iter().find(|(other, _)| *other == name).unwrap().1;
            most.fetch_max(inside.fetch_add(own, Ordering::SeqCst) + own, Ordering::SeqCst);
            lock(&begun).push(name);
            // The first stays until one of the small ones has begun beside it.
            let until = Instant::now() + Duration::from_secs(60);
            while name == "two" && lock(&begun).len() < 2 && Instant::now() < until {
                thread::yield_now();
            }
            inside.fetch_sub(own, Ordering::SeqCst);
        })
        .unwrap();
        let begun = begun.into_inner().unwrap();
        assert_eq!(begun.len(), 4);
        assert!(
            begun[..2].contains(&"two") && begun[..2].contains(&"one"),
            "{begun:?}"
        );
        assert!(most.into_inner() <= 3);
    }

    #[test]
    fn a_lane_that_panics_is_an_error_and_the_others_go_on() {
        let done = AtomicUsize::new(0);
        let items = vec![(1, 1), (2, 2), (3, 1), (4, 1)];
        let outcome = in_workers(items, 2, |item| {
            assert_ne!(item, 2, "as planned");
            done.fetch_add(1, Ordering::SeqCst);
        });
        assert!(outcome.unwrap_err().to_string().contains("panicked"));
        assert_eq!(done.into_inner(), 3);
    }
}

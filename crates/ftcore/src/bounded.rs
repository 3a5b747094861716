//! Calls that may never return, each on a thread of its own that is given up at the deadline: joining a communicator, dividing one.
//! A result that comes too late is handed to the one that cleans it up.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::spawn;
use crate::{Error, Result, time_left};

/// How often a waiting caller looks for a reason to stop.
const LOOK: Duration = Duration::from_millis(20);

enum Answer<T> {
    Awaited,
    Here(T),
    GivenUp,
}

struct Shared<T> {
    answer: Mutex<Answer<T>>,
    moved: Condvar,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, Answer<T>> {
        self.answer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Runs `call` on the thread `name` until it returns, `stop` says why not to go on, or the deadline passes (`late`). What it returns
/// after that goes to `unclaimed`, on the same thread.
pub fn bounded<T: Send + 'static>(
    name: &str,
    deadline: Instant,
    stop: &dyn Fn() -> Option<Error>,
    late: &dyn Fn() -> Error,
    call: impl FnOnce() -> T + Send + 'static,
    unclaimed: impl FnOnce(T) + Send + 'static,
) -> Result<T> {
    let shared = Arc::new(Shared {
        answer: Mutex::new(Answer::Awaited),
        moved: Condvar::new(),
    });
    let theirs = shared.clone();
    spawn(name, move || {
        let result = call();
        let mut answer = theirs.lock();
        if matches!(*answer, Answer::GivenUp) {
            drop(answer);
            return unclaimed(result);
        }
        *answer = Answer::Here(result);
        theirs.moved.notify_all();
    })?;
    let mut answer = shared.lock();
    loop {
        if matches!(*answer, Answer::Here(_))
            && let Answer::Here(result) = std::mem::replace(&mut *answer, Answer::GivenUp)
        {
            return Ok(result);
        }
        let left = time_left(deadline);
        let why = match stop() {
            None if left.is_zero() => Some(late()),
            why => why,
        };
        if let Some(error) = why {
            *answer = Answer::GivenUp;
            return Err(error);
        }
        answer = shared
            .moved
            .wait_timeout(answer, left.min(LOOK))
            .unwrap_or_else(PoisonError::into_inner)
            .0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use crate::{ErrorKind, deadline_in};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn late() -> Error {
        Error::timeout("too late")
    }

    #[test]
    fn an_answer_in_time_is_the_caller_s() {
        let got = bounded("ox-test", deadline_in(LONG), &|| None, &late, || 7, |_| {}).unwrap();
        assert_eq!(got, 7);
    }

    #[test]
    fn a_call_that_does_not_return_is_given_up_and_its_late_answer_is_cleaned_up() {
        let (go, wait) = channel::<()>();
        let (told, cleaned) = channel();
        let e = bounded(
            "ox-test",
            deadline_in(Duration::from_millis(30)),
            &|| None,
            &late,
            move || wait.recv().is_ok(),
            move |answer| told.send(answer).unwrap(),
        )
        .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Timeout);
        go.send(()).unwrap();
        assert!(cleaned.recv_timeout(LONG).unwrap());
    }

    #[test]
    fn a_reason_to_stop_ends_the_wait_before_the_deadline() {
        let (_go, wait) = channel::<()>();
        let stop = || Some(Error::new(ErrorKind::Aborted, "enough"));
        let e = bounded(
            "ox-test",
            deadline_in(LONG),
            &stop,
            &late,
            move || wait.recv().is_ok(),
            |_| {},
        )
        .unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted);
    }
}

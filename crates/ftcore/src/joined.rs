//! Several submitted operations as one [`Work`].

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::{Completer, Completion, Error, OpKind, Tensor, Work, driven_work_pair};

struct Joined {
    kind: OpKind,
    works: Vec<Work>,
    pending: AtomicUsize,
    completer: Mutex<Option<Completer>>,
    /// Why not all could be submitted, and the tensors of those that were not.
    refused: Mutex<Option<(Error, Vec<Tensor>)>>,
}

/// For backends. Ends when all of `works` have, with their tensors one after the other; fails with the first failure in their order, or with
/// `refused`, as a `kind`. Aborting it aborts them, waiting for it waits for each.
pub fn joined(
    kind: OpKind,
    deadline: Instant,
    works: Vec<Work>,
    refused: Option<(Error, Vec<Tensor>)>,
) -> Work {
    let (to_abort, to_drive) = (works.clone(), works.clone());
    let abort = move |reason: &str| to_abort.iter().for_each(|work| work.abort(reason));
    let (work, completer) = driven_work_pair(kind, deadline, abort, move |until| {
        for work in &to_drive {
            // What it says, it says when it is taken.
            let _ = work.wait(until);
        }
    });
    let parts = works.clone();
    let joined = Arc::new(Joined {
        kind,
        // One for this function, so that an end while it runs is not the last one.
        pending: AtomicUsize::new(works.len() + 1),
        works,
        completer: Mutex::new(Some(completer)),
        refused: Mutex::new(refused),
    });
    for part in parts {
        let joined = joined.clone();
        part.on_complete(move |_| joined.one_less());
    }
    joined.one_less();
    work
}

impl Joined {
    fn one_less(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) > 1 {
            return;
        }
        let take =
            |slot: &Mutex<Option<Completer>>| slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(completer) = take(&self.completer) else {
            return;
        };
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (mut failure, mut tensors, mut contributors) = (None, Vec::new(), 0);
        for work in &self.works {
            match work.take() {
                Ok(done) => {
                    tensors.extend(done.tensors);
                    contributors = done.contributors;
                }
                Err(error) => {
                    tensors.extend(work.recover());
                    failure.get_or_insert(error);
                }
            }
        }
        if let Some((error, rest)) = refused {
            tensors.extend(rest);
            failure.get_or_insert(error);
        }
        match failure {
            Some(error) => completer.fail(error.with_op(self.kind.name()), tensors),
            None => completer.succeed(Completion {
                tensors,
                source: None,
                contributors,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{ErrorKind, deadline_in, work_pair};

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(5))
    }

    fn done(byte: u8) -> Completion {
        Completion {
            tensors: vec![Tensor::from_vec(vec![byte])],
            source: None,
            contributors: 0,
        }
    }

    fn bytes(tensors: Vec<Tensor>) -> Vec<u8> {
        tensors
            .into_iter()
            .flat_map(|t| t.into_vec::<u8>().unwrap())
            .collect()
    }

    #[test]
    fn it_ends_with_the_last_of_them_and_gives_the_tensors_in_their_order() {
        let pairs: Vec<_> = (0..3)
            .map(|_| work_pair(OpKind::AllGather, soon(), |_| {}))
            .collect();
        let (works, mut completers): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
        let all = joined(OpKind::AllGather, soon(), works, None);
        completers.pop().unwrap().succeed(done(2));
        completers.remove(0).succeed(done(0));
        assert!(matches!(all.status(), crate::Status::Pending));
        completers.pop().unwrap().succeed(done(1));
        assert_eq!(bytes(all.take().unwrap().tensors), [0, 1, 2]);
    }

    #[test]
    fn a_failure_is_told_when_all_have_ended_with_every_tensor_that_is_free() {
        let (one, first) = work_pair(OpKind::AllGather, soon(), |_| {});
        let (two, second) = work_pair(OpKind::AllGather, soon(), |_| {});
        let rest = (
            Error::new(ErrorKind::Poisoned, "later"),
            vec![Tensor::from_vec(vec![9u8])],
        );
        let all = joined(OpKind::AllGather, soon(), vec![one, two], Some(rest));
        second.succeed(done(7));
        assert!(matches!(all.status(), crate::Status::Pending));
        first.fail(Error::timeout("no"), vec![Tensor::from_vec(vec![6u8])]);
        let error = all.wait(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_eq!(error.context().op, Some("all_gather"));
        assert_eq!(bytes(all.recover()), [6, 7, 9]);
    }
}

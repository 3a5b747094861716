//! The reductions of a round in flight, and the outer step that follows.
//!
//! Where inner steps are made meanwhile, the outer step is made beside them, on a thread of its own and on copies: before the vote nothing of it
//! counts. What is left for the thread that trains is to put the result in its place and to mix it into the local parameters.

use std::sync::Arc;
use std::thread::JoinHandle;

use ftcore::{DType, Error, ErrorKind, Result, Tensor};
use replica::ManagedWork;

use super::outer::next_part;
use crate::backup::Copies;
use crate::optim::Optimizer;
use crate::state::{Fragment, own};

/// A round's reductions.
pub(super) enum Stepping {
    /// The outer step is made once they have ended.
    Later(Vec<ManagedWork>),
    /// It is made as soon as they have.
    Beside(JoinHandle<Result<Reduced>>),
}

impl Default for Stepping {
    fn default() -> Self {
        Self::Later(Vec::new())
    }
}

/// What came of a round's reductions.
pub(super) struct Reduced {
    /// The least number of contributors; 0 without data.
    pub(super) contributors: u32,
    /// The mean outer gradient, flat over the fragment.
    pub(super) mean: Vec<f32>,
    /// What was reduced in.
    pub(super) buckets: Vec<Tensor>,
    /// The fragment after the outer step, if that was made.
    pub(super) stepped: Option<Stepped>,
}

/// A fragment after an outer step, or before it.
pub(super) struct Stepped {
    pub(super) optimizer: Arc<dyn Optimizer>,
    /// One tensor per slot.
    pub(super) global: Vec<Tensor>,
}

/// Memory that is kept from round to round, as new pages cost more than the arithmetic on them.
#[derive(Default)]
pub(super) struct Scratch {
    flat: Vec<Vec<f32>>,
    stale: Option<Stepped>,
}

impl Scratch {
    /// An empty vector.
    pub(super) fn flat(&mut self) -> Vec<f32> {
        let mut flat = self.flat.pop().unwrap_or_default();
        flat.clear();
        flat
    }

    /// A round needs two vectors: its gradient and the mean.
    pub(super) fn keep(&mut self, flat: impl Iterator<Item = Vec<f32>>) {
        self.flat.extend(flat);
        self.flat.truncate(2);
    }

    /// What a fragment was before a round, for the next outer step.
    pub(super) fn keep_stale(&mut self, fragment: Stepped) {
        self.stale = Some(fragment);
    }
}

impl Stepping {
    /// The outer step on `fragment`, beside what its caller does. `expected`: the values that are reduced.
    ///
    /// Errors: there can be no further thread.
    pub(super) fn beside(
        works: Vec<ManagedWork>,
        expected: usize,
        fragment: &Fragment,
        scratch: &mut Scratch,
    ) -> Result<Self> {
        if !fragment.global.device().is_cpu() {
            // The copies would need as much memory again on the device.
            return Ok(Self::Later(works));
        }
        let (flat, stale) = (scratch.flat(), scratch.stale.take());
        let (global, optimizer) = (fragment.global.clone(), fragment.optimizer.clone());
        let make = move || {
            let mut reduced = reduced(&works, expected, flat)?;
            reduced.stepped = Some(stepped(&global, &*optimizer, &reduced.mean, stale)?);
            Ok(reduced)
        };
        let thread = std::thread::Builder::new().name("ox-outer".into()).spawn(make);
        thread
            .map(Self::Beside)
            .map_err(|e| Error::io("starting the thread of an outer step", e))
    }

    /// Waits for the reductions. Errors: the first that failed.
    pub(super) fn end(self, expected: usize, scratch: &mut Scratch) -> Result<Reduced> {
        match self {
            Self::Later(works) => reduced(&works, expected, scratch.flat()),
            Self::Beside(thread) => {
                let ended = thread.join();
                ended.unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "an outer step panicked")))
            }
        }
    }
}

/// The mean out of the buckets, into `mean`.
fn reduced(works: &[ManagedWork], expected: usize, mut mean: Vec<f32>) -> Result<Reduced> {
    let mut buckets = Vec::with_capacity(works.len());
    let mut contributors = None;
    mean.reserve(expected);
    for work in works {
        let done = work.take()?;
        contributors =
            Some(contributors.map_or(done.contributors, |least: u32| least.min(done.contributors)));
        let bucket = done.into_tensor()?;
        mean.extend_from_slice(bucket.as_slice()?);
        buckets.push(bucket);
    }
    if mean.len() != expected {
        let text = format!("the buckets returned {} of {expected} values", mean.len());
        return Err(Error::new(ErrorKind::Internal, text));
    }
    Ok(Reduced {
        contributors: contributors.unwrap_or(0),
        mean,
        buckets,
        stepped: None,
    })
}

/// The outer step on copies, in memory that is stale where it fits.
fn stepped(
    global: &Copies,
    optimizer: &dyn Optimizer,
    mean: &[f32],
    stale: Option<Stepped>,
) -> Result<Stepped> {
    let (old, mut tensors) = stale.map_or((None, Vec::new()), |s| (Some(s.optimizer), s.global));
    let assigned = |mut old: Arc<dyn Optimizer>| Arc::get_mut(&mut old)?.assign(optimizer).then_some(old);
    let mut next = old
        .and_then(assigned)
        .unwrap_or_else(|| optimizer.boxed_clone().into());
    let optimizer = own(&mut next)?;
    optimizer.begin_step();
    let mut rest = mean;
    let mut moved = Vec::with_capacity(global.counts().len());
    for (slot, count) in global.counts().enumerate() {
        let part = next_part(&mut rest, count)?;
        let mut to = match tensors.iter().position(|t| t.count() == count) {
            Some(at) => tensors.swap_remove(at),
            None => Tensor::zeros(DType::F32, count),
        };
        let values = to.as_mut_slice()?;
        global.read(slot, &mut |from| {
            values.copy_from_slice(from);
            Ok(())
        })?;
        optimizer.update(slot, values, part)?;
        moved.push(to);
    }
    Ok(Stepped {
        optimizer: next,
        global: moved,
    })
}

#[cfg(test)]
mod tests {
    use ftcore::{Completion, OpKind, Work};
    use replica::StateDict;

    use super::*;
    use crate::backup::{Backup, Keeper};
    use crate::optim::Sgd;
    use crate::{Parameters as _, SliceParameters};

    const MEAN: [f32; 5] = [1.0, -2.0, 3.0, 0.5, 4.0];

    /// The mean, in buckets of three values.
    fn works() -> Vec<ManagedWork> {
        let contributors = [3, 2];
        let done = MEAN.chunks(3).zip(contributors).map(|(bucket, contributors)| {
            let tensors = vec![Tensor::from_slice(bucket)];
            Work::finished(
                OpKind::AllReduce,
                Completion {
                    tensors,
                    source: None,
                    contributors,
                },
            )
        });
        done.map(ManagedWork::submitted).collect()
    }

    fn fragment() -> Fragment {
        let layers = vec![
            ("a".to_owned(), vec![1.0, 2.0]),
            ("b".to_owned(), vec![3.0, 4.0, 5.0]),
        ];
        let params = SliceParameters::new(layers);
        let members: Vec<usize> = (0..params.len()).collect();
        Fragment {
            global: Keeper::new(Backup::Host, &params)
                .unwrap()
                .copy(&params, &members)
                .unwrap(),
            optimizer: Arc::new(Sgd::new(0.5, 0.5, true)),
            base: None,
        }
    }

    /// Global values and the outer optimizer's state.
    fn all_of(global: &[Vec<f32>], optimizer: &dyn Optimizer) -> (Vec<Vec<f32>>, Vec<u8>) {
        let mut state = StateDict::new();
        optimizer.save("o", &mut state).unwrap();
        let bytes = state.iter().flat_map(|(_, tensor)| tensor.data.to_vec());
        (global.to_vec(), bytes.collect())
    }

    fn values(global: &[Tensor]) -> Vec<Vec<f32>> {
        global.iter().map(|t| t.as_slice().unwrap().to_vec()).collect()
    }

    #[test]
    fn an_outer_step_beside_its_caller_changes_nothing_before_the_vote_and_needs_no_new_memory() {
        let (mut fragment, mut scratch) = (fragment(), Scratch::default());
        let mut by_hand = (
            Sgd::new(0.5, 0.5, true),
            vec![vec![1.0, 2.0], vec![3.0, 4.0, 5.0]],
        );
        let mut places = Vec::new();
        for _ in 0..4 {
            let before = |f: &Fragment| {
                let global = [f.global.get(0).unwrap(), f.global.get(1).unwrap()];
                all_of(&global, &*f.optimizer)
            };
            let untouched = before(&fragment);
            let stepping = Stepping::beside(works(), MEAN.len(), &fragment, &mut scratch).unwrap();
            assert!(matches!(stepping, Stepping::Beside(_)));
            let mut reduced = stepping.end(MEAN.len(), &mut scratch).unwrap();
            assert_eq!(before(&fragment), untouched);
            assert_eq!(
                (reduced.contributors, reduced.mean.as_slice()),
                (2, MEAN.as_slice())
            );
            let stepped = reduced.stepped.take().unwrap();
            for (slot, (values, part)) in by_hand.1.iter_mut().zip([&MEAN[..2], &MEAN[2..]]).enumerate() {
                by_hand.0.update(slot, values, part).unwrap();
            }
            let made = all_of(&values(&stepped.global), &*stepped.optimizer);
            assert_eq!(made, all_of(&by_hand.1, &by_hand.0));
            // As a commit does it.
            places.push(stepped.global[1].as_slice::<f32>().unwrap().as_ptr());
            let mut stale = Stepped {
                optimizer: std::mem::replace(&mut fragment.optimizer, stepped.optimizer),
                global: Vec::new(),
            };
            for (slot, tensor) in stepped.global.into_iter().enumerate() {
                stale
                    .global
                    .extend(fragment.global.replace(slot, tensor).unwrap());
            }
            scratch.keep_stale(stale);
            scratch.keep([reduced.mean].into_iter());
        }
        assert_eq!(
            (places[0], places[1]),
            (places[2], places[3]),
            "two places take turns"
        );
    }

    #[test]
    fn a_reduction_that_failed_and_one_that_is_too_short_are_errors() {
        for beside in [true, false] {
            let (fragment, mut scratch) = (fragment(), Scratch::default());
            let mut end = |works: Vec<ManagedWork>| {
                let stepping = match beside {
                    true => Stepping::beside(works, MEAN.len(), &fragment, &mut scratch).unwrap(),
                    false => Stepping::Later(works),
                };
                let ended = stepping.end(MEAN.len(), &mut scratch);
                ended.map(|reduced| reduced.mean).unwrap_err()
            };
            let mut failed = works();
            failed.push(ManagedWork::failed(
                Error::new(ErrorKind::PeerLost, "rank 1 is gone"),
                Vec::new(),
            ));
            assert_eq!(end(failed).kind(), ErrorKind::PeerLost);
            let mut short = works();
            short.pop();
            let error = end(short);
            assert!(error.to_string().contains("3 of 5 values"), "{error}");
        }
    }
}

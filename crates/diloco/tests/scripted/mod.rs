//! A replica that plays the rest of the world: what it averages with, whose votes fail and whom it heals from is scripted.

#![allow(dead_code, reason = "each test takes what it needs")]

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use checkpoint::StateDict;
use diloco::{Diloco, DilocoConfig, SliceParameters};
use ftcore::{Completion, Error, ErrorKind, OpKind, ReduceOp, Result, Tensor, Traffic, Work};
use manager::{Healed, ManagedWork, Participation, Replica, State};

/// The other replicas as a function: given the step and this replica's bucket, what the average over all is.
type World = Box<dyn FnMut(i64, &[f32]) -> Vec<f32>>;

/// See the module.
pub(crate) struct Scripted {
    pub(crate) step: i64,
    world: World,
    /// Outcomes of the next all-reduces (empty: they succeed).
    pub(crate) reductions: VecDeque<bool>,
    /// Votes of the rest of the replica (empty: yes).
    pub(crate) votes: VecDeque<bool>,
    /// State to heal from at the next quorum, and its step.
    pub(crate) heal: Option<(i64, StateDict)>,
    /// What `save` gave at the last quorum, as a healing peer would get it; nothing without `snapshots`.
    pub(crate) snapshot: StateDict,
    /// Whether a peer asks for the state at every quorum.
    pub(crate) snapshots: bool,
    error: Option<Error>,
}

impl Scripted {
    pub(crate) fn new(mut world: impl FnMut(&[f32]) -> Vec<f32> + 'static) -> Self {
        Self::by_step(move |_, own| world(own))
    }

    /// Of a world that looks at the step.
    pub(crate) fn by_step(world: impl FnMut(i64, &[f32]) -> Vec<f32> + 'static) -> Self {
        Self {
            step: 0,
            world: Box::new(world),
            reductions: VecDeque::new(),
            votes: VecDeque::new(),
            heal: None,
            snapshot: StateDict::new(),
            snapshots: true,
            error: None,
        }
    }

    /// Replicas that all did the same.
    pub(crate) fn identical() -> Self {
        Self::new(<[f32]>::to_vec)
    }
}

impl Replica for Scripted {
    fn start_quorum(&mut self, state: &mut dyn State, _: Instant) -> Result<Participation> {
        self.error = None;
        let mut healed = None;
        if let Some((step, dict)) = self.heal.take() {
            state.load(&dict)?;
            self.step = step;
            healed = Some(Healed {
                source: Some(0),
                bytes: 1,
                took: Duration::ZERO,
            });
        }
        self.snapshot = StateDict::new();
        if self.snapshots {
            state.save(&mut self.snapshot)?;
        }
        let contributes = healed.is_none();
        let members = vec!["a".into(), "b".into()];
        Ok(Participation {
            epoch: 1,
            step: self.step,
            replica_rank: 0,
            replica_world_size: 2,
            contributes,
            healed,
            members,
        })
    }

    fn allreduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        assert_eq!(op, ReduceOp::Avg);
        if self.reductions.pop_front() == Some(false) {
            let e = Error::new(ErrorKind::PeerLost, "scripted");
            self.error = Some(e.clone());
            return ManagedWork::failed(e, tensors);
        }
        let tensors = tensors
            .iter()
            .map(|t| Tensor::from_vec((self.world)(self.step, t.as_slice::<f32>().unwrap())))
            .collect();
        ManagedWork::submitted(Work::finished(
            OpKind::AllReduce,
            Completion {
                tensors,
                source: None,
                contributors: 2,
            },
        ))
    }

    fn should_commit(&mut self, _: Instant) -> Result<bool> {
        let yes = self.error.is_none() && self.votes.pop_front().unwrap_or(true);
        self.step += i64::from(yes);
        Ok(yes)
    }

    fn current_step(&self) -> i64 {
        self.step
    }
    fn report_error(&mut self, error: Error) {
        self.error = Some(error);
    }
    fn error(&self) -> Option<Error> {
        self.error.clone()
    }
    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
    fn leave(&mut self, _: Instant) -> Result<()> {
        Ok(())
    }
}

/// A training loop without state of its own.
pub(crate) struct Nothing;
impl State for Nothing {
    fn save(&self, _: &mut StateDict) -> Result<()> {
        Ok(())
    }
    fn load(&mut self, _: &StateDict) -> Result<()> {
        Ok(())
    }
}

/// Zeros of these lengths, `p0`, `p1` and so on.
pub(crate) fn params(sizes: &[usize]) -> SliceParameters {
    SliceParameters::new(
        sizes
            .iter()
            .enumerate()
            .map(|(i, n)| (format!("p{i}"), vec![0.0; *n]))
            .collect(),
    )
}

/// The layer of parameter `pN` is N.
pub(crate) fn layer(name: &str) -> usize {
    name[1..].parse().unwrap()
}

/// A run after its initial synchronisation.
pub(crate) fn begun(
    replica: Scripted,
    sizes: &[usize],
    config: DilocoConfig,
) -> Diloco<Scripted, SliceParameters> {
    let mut d = Diloco::new(replica, params(sizes), config, &layer).unwrap();
    let reports = d.begin(&mut Nothing).unwrap();
    assert_eq!(
        reports.len(),
        1,
        "the initial synchronisation is a round of its own"
    );
    assert_eq!(d.step(), 1);
    d
}

//! What a training loop sees of the tolerance layer.

use std::fmt;
use std::time::{Duration, Instant};

use crate::state_dict::StateDict;
use ftcore::{DType, Epoch, ReduceOp, Result, Step, Tensor, Traffic};

use crate::ManagedWork;

/// State that a healing replica takes over from a healthy one.
///
/// `save` is called on the training thread inside `start_quorum`, when another replica needs to heal from this one; the
/// result is an immutable snapshot (L10). `load` is called there too, on the replica that heals, more than once if it is far behind.
///
/// ```
/// use ftcore::Result;
/// use oxccl_replica::{State, StateDict};
///
/// struct Train {
///     weights: Vec<f32>,
///     next_sample: i64,
/// }
///
/// impl State for Train {
///     fn save(&self, out: &mut StateDict) -> Result<()> {
///         out.insert_f32("weights", &[self.weights.len()], &self.weights)?;
///         out.insert_i64s("next sample", &[self.next_sample])
///     }
///     fn load(&mut self, from: &StateDict) -> Result<()> {
///         let weights = from.get_f32_shaped("weights", &[self.weights.len()])?;
///         let next = from.get_i64s("next sample")?;
///         // All of it is there and fits: now it may change.
///         self.weights = weights;
///         self.next_sample = next.first().copied().unwrap_or_default();
///         Ok(())
///     }
/// }
/// ```
pub trait State {
    /// Puts everything that the next step depends on into `out`.
    fn save(&self, out: &mut StateDict) -> Result<()>;
    /// Takes the state over. On an error the replica does not advance (INV-5) and tries again.
    fn load(&mut self, from: &StateDict) -> Result<()>;
}

/// The outcome of a quorum, as far as a training loop needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Participation {
    /// The epoch (quorum id) of this configuration.
    pub epoch: Epoch,
    /// The step that this quorum works on, after healing.
    pub step: Step,
    /// This replica's rank among the members.
    pub replica_rank: u32,
    /// The number of members, healing ones included.
    pub replica_world_size: u32,
    /// True if this replica's values count in this attempt. A replica contributes only work that it did itself: one that healed
    /// into this step holds copies, so it stands aside in every attempt at the step while a member is there that did not heal
    /// into it. Spares never contribute. It is the same on all ranks of the replica, also where the epoch did not come up for one of them and will
    /// not commit: what the ranks compute together, all of them do, or none.
    pub contributes: bool,
    /// The place among those that contribute, in order of their ids; `None` if this replica does not.
    pub contributor_rank: Option<u32>,
    /// The number of replicas that contribute to this attempt.
    pub contributors: u32,
    /// True if those that contribute close the run with this step, in which nothing is reduced: a replica that came back may not have known.
    pub closes: bool,
    /// `Some` if this replica took its state over from a peer just now, as a spare or as a member; `took` is the time of all transfers.
    pub healed: Option<Healed>,
    /// The members: how many, and their ids where those are told.
    pub members: Members,
}

/// The members of a quorum. Of a large one (more than 256) the lighthouse tells each replica its own part and not the ids of all; its status has them
/// (`coordination::LighthouseClient::status`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Members {
    count: usize,
    ids: Vec<String>,
}

impl Members {
    /// The `replica_world_size` members of a quorum; `ids` is empty where they were not told.
    pub fn of(replica_world_size: u32, ids: Vec<String>) -> Self {
        let count = usize::try_from(replica_world_size).unwrap_or(usize::MAX);
        Self { count, ids }
    }

    /// Their number.
    pub fn len(&self) -> usize {
        self.count
    }

    /// True before the first quorum.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Their ids, in the order of their ranks; `None` if those were not told.
    pub fn ids(&self) -> Option<&[String]> {
        (self.ids.len() == self.count).then_some(&self.ids)
    }
}

impl FromIterator<String> for Members {
    fn from_iter<T: IntoIterator<Item = String>>(ids: T) -> Self {
        let ids: Vec<String> = ids.into_iter().collect();
        Self {
            count: ids.len(),
            ids,
        }
    }
}

/// A recovery that just happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Healed {
    /// The rank of the replica that the state came from.
    pub source: Option<u32>,
    /// The size of the state in bytes.
    pub bytes: usize,
    /// From the quorum's answer to the applied state.
    pub took: Duration,
}

/// `healed from replica rank 1 (800 bytes in 4 ms)`.
impl fmt::Display for Healed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("healed")?;
        if let Some(rank) = self.source {
            write!(f, " from replica rank {rank}")?;
        }
        write!(f, " ({} bytes in {} ms)", self.bytes, self.took.as_millis())
    }
}

/// Writes what the reports of committed steps say in one line:
/// `step 7 by 1 replica, after 1 failed attempt, healed from replica rank 1 (800 bytes in 4 ms)`.
pub fn write_commit(
    f: &mut fmt::Formatter<'_>,
    step: Step,
    contributors: u32,
    failed_attempts: u32,
    healed: Option<&Healed>,
) -> fmt::Result {
    let s = |n: u32| if n == 1 { "" } else { "s" };
    write!(f, "step {step} by {contributors} replica{}", s(contributors))?;
    if failed_attempts > 0 {
        write!(
            f,
            ", after {failed_attempts} failed attempt{}",
            s(failed_attempts)
        )?;
    }
    healed.map_or(Ok(()), |healed| write!(f, ", {healed}"))
}

/// One replica's view of a fault-tolerant job. Not thread-safe: one training loop drives it.
///
/// ```
/// use std::time::Duration;
///
/// use ftcore::{ReduceOp, Result, Tensor, deadline_in};
/// use oxccl_replica::Replica;
///
/// /// One step, done again until it commits.
/// fn step(replica: &mut impl Replica, weights: &mut Vec<f32>, gradients: &[f32]) -> Result<()> {
///     loop {
///         let deadline = deadline_in(Duration::from_secs(60));
///         replica.start_quorum(weights, deadline)?; // who takes part; heals this replica if it is behind
///         let mean = replica.all_reduce(vec![Tensor::from_slice(gradients)], ReduceOp::Avg);
///         if replica.should_commit(deadline)? {
///             let mean = mean.take()?.into_tensor()?;
///             weights.iter_mut().zip(mean.as_slice::<f32>()?).for_each(|(w, g)| *w -= 0.1 * g);
///             return Ok(());
///         }
///     }
/// }
/// ```
pub trait Replica {
    /// Agrees with the other replicas on who takes part in the current step, connects the group and heals this
    /// replica if it is behind. Blocks until the quorum stands or `deadline`.
    ///
    /// A quorum whose epoch does not come up (a member died meanwhile, a transfer broke off) is not an error here: the
    /// step then fails its vote, on all ranks of the replica, and is done again in the next quorum.
    ///
    /// Errors: `Unavailable` or `Timeout` when no quorum came about; nothing changed then, and it may be called again. `PeerLost` if rank 0
    /// of this replica is gone: its servers are, too, and this rank has to be started again with it.
    /// `InvalidArgument` or `Unsupported` for what no other epoch would change, such as the state of another model.
    fn start_quorum(&mut self, state: &mut dyn State, deadline: Instant) -> Result<Participation>;

    /// Asks for the quorum of the next step and returns at once: it is found, and the group connected for it, while the caller computes.
    /// [`start_quorum`](Self::start_quorum) finishes it with the state, before the vote. False, as by default, if this replica cannot:
    /// `start_quorum` does all then. A quorum that was begun before and not voted on is given up.
    ///
    /// Reductions may be submitted before `start_quorum`: the first one waits for the quorum. If this replica turns out to be behind, it heals in
    /// `start_quorum`, on the caller's thread as ever, and what it computed from its old state does not count ([`await_quorum`](Self::await_quorum)
    /// tells before it is sent). If peers heal from it, its snapshot is made in `start_quorum`, and they wait for it: until then the state
    /// that it shares with them stays as it is.
    fn begin_quorum(&mut self, _deadline: Instant) -> Result<bool> {
        Ok(false)
    }

    /// Waits for the quorum that was begun. A replica that is behind does not contribute, and `step` is that of the state that it still has.
    ///
    /// Errors: those of `start_quorum`, which gives the same one. `InvalidState` if none was begun.
    fn await_quorum(&mut self) -> Result<Participation> {
        let text = "no quorum was asked for ahead: begin_quorum says whether this replica can";
        Err(ftcore::Error::new(ftcore::ErrorKind::InvalidState, text))
    }

    /// Gives up the quorum that was begun: nothing of it is voted on, and the next one is asked for anew.
    fn abandon_quorum(&mut self) {}

    /// Reduces tensors of one dtype over the members. Averages count the contributors in the reduction (INV-4). It never
    /// fails at once: an error shows in the work and in the vote.
    fn all_reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork;

    /// A one-dimensional host tensor of `count` zeros, in the memory that [`all_reduce`](Self::all_reduce) moves with the least copying
    /// ([`ProcessGroup::alloc`](ftcore::ProcessGroup::alloc)). Worth it for what is used in many steps.
    fn alloc(&self, dtype: DType, count: usize) -> Tensor {
        Tensor::zeros(dtype, count)
    }

    /// Waits for everything submitted in this step and decides together with the other ranks of this replica. True:
    /// the step counts and `current_step` has advanced; apply its result now. False: throw it away and start again.
    ///
    /// Errors: `InvalidState` once more attempts in a row were lost than `manager::ManagerConfig::max_retries` allows. If the vote itself could not be taken; then the step did not commit here. And the step's first error, if it is
    /// `InvalidArgument` or `Unsupported`: another epoch would not change that, so the run ends here at once, and with it the other
    /// ranks of this replica. The other replicas go on without it. Every other error of a step is a lost vote.
    fn should_commit(&mut self, deadline: Instant) -> Result<bool>;

    /// The number of steps committed (or healed to).
    fn current_step(&self) -> Step;

    /// How many batches led to the state, over all replicas: each committed step that reduced something counts one for each of its
    /// contributors. A replica that heals takes the number over with the state.
    fn batches_committed(&self) -> i64;

    /// True from a quorum on with which an operator told this replica to drain: once the step has committed it leaves ([`leave`](Self::leave)),
    /// and its process ends well. All ranks of a replica are told with the same quorum. A replica that goes on is told again with the next.
    fn draining(&self) -> bool;

    /// The next quorum is, or is not, that of the run's last step. A replica that is far behind fetches the state beside the others, who do not wait
    /// for it; in the last step they do, since there is no later one.
    fn set_last(&mut self, _is_last: bool) {}

    /// Far behind, this replica is a member of the next quorum at once, and the others wait while it takes the state; by default it takes it beside
    /// them and misses the steps that they do meanwhile. For steps that take far longer than a transfer, as the rounds of DiLoCo.
    fn set_joins_at_once(&mut self, _at_once: bool) {}

    /// What was restored of the present step is a copy of another replica's work, which that one contributes itself: as after healing into the step, this
    /// replica does not. Before the first quorum.
    fn set_healed(&mut self) {}

    /// Shows that the training thread moves. The calls above do, too; a loop that computes for long between them calls this now and
    /// then, since a rank without progress takes its replica out of the quorum (`ManagerConfig::progress_timeout`).
    fn progress(&self);

    /// Records an error of this step: the vote will be no.
    fn report_error(&mut self, error: ftcore::Error);

    /// The first error of this step, if there was one.
    fn error(&self) -> Option<ftcore::Error>;

    /// Bytes moved by the group so far.
    fn traffic(&self) -> Traffic;

    /// Leaves the job, so that no replica waits for this one's heartbeat to run out.
    fn leave(&mut self, deadline: Instant) -> Result<()>;
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Told(u32, u32, Option<Healed>);

    impl fmt::Display for Told {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write_commit(f, Step(7), self.0, self.1, self.2.as_ref())
        }
    }

    #[test]
    fn a_commit_is_told_in_one_line() {
        assert_eq!(Told(2, 0, None).to_string(), "step 7 by 2 replicas");
        let healed = Healed {
            source: Some(1),
            bytes: 800,
            took: Duration::from_millis(4),
        };
        assert_eq!(
            Told(1, 1, Some(healed)).to_string(),
            "step 7 by 1 replica, after 1 failed attempt, healed from replica rank 1 (800 bytes in 4 ms)"
        );
        assert_eq!(
            Told(3, 2, None).to_string(),
            "step 7 by 3 replicas, after 2 failed attempts"
        );
    }
}

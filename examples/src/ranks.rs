//! The ranks of one replica: they share each batch, hold the same parameters, and go through quorums in step.
//!
//! Gradients of the ranks' parts are averaged over a group inside the replica ([`Ranks::average`]), which is configured once per incarnation.
//! Between replicas every rank reduces everything with the ranks of its own number ([`InStep`]): all ranks of a replica send the same values
//! to the same peers in the same order, so that they end with the same bits and need no exchange after a commit. Shards would send
//! M times fewer bytes between replicas, but a rank that has committed its shard would still need the others' to have a state; and DiLoCo sends
//! rarely. An error of the group inside ends the rank, and with it its replica: the supervisor starts all ranks again, and they heal.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ftcore::{
    Collective, Configuration, DType, Device, Epoch, Error, ErrorKind, GroupOptions, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, Step, Store, SubmitOptions, TcpStore, Tensor, Traffic, deadline_in,
};
use manager::{ManagedWork, Manager, Participation, Replica, State};
use oxccl::launch::ReplicaEnv;

use crate::device;

/// How long the ranks of a replica may take to find each other: they start together.
const MEET: Duration = Duration::from_secs(30);
/// How long an operation inside the replica may take. A rank that stands still longer ends its replica; the others go on without it long before.
const INSIDE: Duration = Duration::from_secs(60);

/// This process among the ranks of its replica.
pub struct Ranks {
    rank: u32,
    size: u32,
    /// There is nothing to exchange with a single rank.
    inside: Option<Inside>,
}

struct Inside {
    group: Arc<dyn ProcessGroup>,
    store: Arc<dyn Store>,
}

impl Ranks {
    /// Connects the ranks of this incarnation of the replica over the backend. Blocks until all are there, or half a minute.
    pub fn meet(
        env: &ReplicaEnv,
        backend: Option<&str>,
        device: &Device,
        options: &GroupOptions,
    ) -> Result<Arc<Self>> {
        let inside = match &env.store {
            Some(address) if env.ranks > 1 => Some(Inside::connect(env, address, backend, device, options)?),
            _ => None,
        };
        Ok(Arc::new(Self {
            rank: env.rank,
            size: env.ranks,
            inside,
        }))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// How many there are.
    pub fn size(&self) -> usize {
        self.size as usize
    }

    /// True for the one that writes what belongs to the replica as a whole.
    pub fn is_first(&self) -> bool {
        self.rank == 0
    }

    /// Where the ranks of this replica meet; `None` for a single one.
    pub fn store(&self) -> Option<Arc<dyn Store>> {
        self.inside.as_ref().map(|inside| inside.store.clone())
    }

    /// True if there is something to average.
    pub fn are_several(&self) -> bool {
        self.inside.is_some()
    }

    /// Replaces the gradients of this rank's part of the batch and its loss by the means over all ranks: the same bits on all of them.
    ///
    /// Errors: those of the group, which end this replica's incarnation.
    pub fn average(&self, gradients: &mut [Vec<f32>], loss: &mut f32) -> Result<()> {
        let Some(inside) = &self.inside else {
            return Ok(());
        };
        let mut flat: Vec<f32> = gradients.concat();
        flat.push(*loss);
        let mean = inside.all_reduce(Tensor::from_vec(flat), ReduceOp::Avg)?;
        let mut rest = mean.as_slice::<f32>()?;
        for gradient in gradients {
            let (own, others) = rest.split_at_checked(gradient.len()).ok_or_else(too_short)?;
            gradient.copy_from_slice(own);
            rest = others;
        }
        *loss = *rest.first().ok_or_else(too_short)?;
        Ok(())
    }

    /// True if all ranks call this with the same values.
    fn agree(&self, mine: &[i64]) -> Result<bool> {
        let Some(inside) = &self.inside else {
            return Ok(true);
        };
        // The least of v and the least of -v are v and -v only where all have the same.
        let both: Vec<i64> = mine.iter().flat_map(|v| [*v, v.wrapping_neg()]).collect();
        let least = inside.all_reduce(Tensor::from_slice(&both), ReduceOp::Min)?;
        Ok(least.as_slice::<i64>()? == both)
    }
}

impl Inside {
    fn connect(
        env: &ReplicaEnv,
        address: &str,
        backend: Option<&str>,
        device: &Device,
        options: &GroupOptions,
    ) -> Result<Self> {
        let deadline = deadline_in(MEET);
        let store: Arc<dyn Store> = Arc::new(TcpStore::connect(address, deadline)?);
        let group = device::group(backend, device, options)?;
        group.configure(Configuration {
            store: store.clone(),
            prefix: "inside/".into(),
            name: format!("replica{}", env.replica),
            epoch: Epoch(u64::from(env.incarnation) + 1),
            rank: env.rank,
            world_size: env.ranks,
            deadline,
            cancel: Default::default(),
        })?;
        Ok(Self { group, store })
    }

    fn all_reduce(&self, tensor: Tensor, op: ReduceOp) -> Result<Tensor> {
        let tensors = vec![tensor];
        self.run(Collective::AllReduce { tensors, op })
    }

    fn run(&self, operation: Collective) -> Result<Tensor> {
        let options = SubmitOptions {
            deadline: Some(deadline_in(INSIDE)),
            ..SubmitOptions::default()
        };
        let done = match self.group.run(operation, options) {
            Ok(work) => work.take_tensor(),
            Err(rejected) => Err(rejected.error),
        };
        done.map_err(|e| {
            // Whose fault it is does not matter here: the replica goes on as a whole, in its next incarnation.
            let text = format!("the ranks of this replica cannot go on together: {}", e.message());
            Error::new(ErrorKind::PeerLost, text).with_source(e)
        })
    }
}

fn too_short() -> Error {
    Error::new(ErrorKind::Internal, "the mean has fewer values than were sent")
}

/// A replica whose ranks leave a quorum in step: each with the same epoch, step and part, or none with any.
///
/// One rank may connect or heal while another one fails to. What they compute next would differ, and a rank that waits inside the replica would
/// wait for one that waits for its vote. So they compare after each quorum; if they differ, all give the attempt up at once and ask again. Ranks
/// that healed have done so from one replica: the manager sees to that.
pub struct InStep<R> {
    replica: R,
    ranks: Arc<Ranks>,
}

impl<R: Replica> InStep<R> {
    /// `replica` is this rank's.
    pub fn new(replica: R, ranks: Arc<Ranks>) -> Self {
        Self { replica, ranks }
    }
}

impl InStep<Manager> {
    /// The manager of this rank.
    pub fn manager(&self) -> &Manager {
        &self.replica
    }
}

#[deny(clippy::missing_trait_methods)]
impl<R: Replica> Replica for InStep<R> {
    /// Ranks of a replica compare what the quorum told them before they compute.
    fn begin_quorum(&mut self, deadline: Instant) -> Result<bool> {
        if self.ranks.are_several() {
            return Ok(false);
        }
        self.replica.begin_quorum(deadline)
    }
    fn await_quorum(&mut self) -> Result<Participation> {
        self.replica.await_quorum()
    }
    fn abandon_quorum(&mut self) {
        self.replica.abandon_quorum();
    }
    fn alloc(&self, dtype: DType, count: usize) -> Tensor {
        self.replica.alloc(dtype, count)
    }
    fn start_quorum(&mut self, state: &mut dyn State, deadline: Instant) -> Result<Participation> {
        loop {
            let participation = self.replica.start_quorum(state, deadline)?;
            if !self.ranks.are_several() {
                return Ok(participation);
            }
            let is_up = self.replica.error().is_none();
            let mine = [
                participation.epoch.signed(),
                participation.step.0,
                i64::from(participation.contributes),
                i64::from(participation.healed.is_some()),
                i64::from(is_up),
            ];
            if self.ranks.agree(&mine)? && is_up {
                return Ok(participation);
            }
            if is_up {
                let text = "another rank of this replica did not come up in this epoch";
                self.replica.report_error(Error::new(ErrorKind::Aborted, text));
            }
            match self.replica.should_commit(deadline) {
                Ok(_) => {}
                Err(e) if e.is_retryable() => {}
                Err(e) => return Err(e),
            }
        }
    }

    fn all_reduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        self.replica.all_reduce(tensors, op)
    }

    fn should_commit(&mut self, deadline: Instant) -> Result<bool> {
        self.replica.should_commit(deadline)
    }

    fn current_step(&self) -> Step {
        self.replica.current_step()
    }

    fn batches_committed(&self) -> i64 {
        self.replica.batches_committed()
    }

    fn draining(&self) -> bool {
        self.replica.draining()
    }

    fn set_last(&mut self, is_last: bool) {
        self.replica.set_last(is_last);
    }

    fn set_joins_at_once(&mut self, at_once: bool) {
        self.replica.set_joins_at_once(at_once);
    }

    fn set_healed(&mut self) {
        self.replica.set_healed();
    }

    fn progress(&self) {
        self.replica.progress();
    }

    fn report_error(&mut self, error: Error) {
        self.replica.report_error(error);
    }

    fn error(&self) -> Option<Error> {
        self.replica.error()
    }

    fn traffic(&self) -> Traffic {
        self.replica.traffic()
    }

    fn leave(&mut self, deadline: Instant) -> Result<()> {
        self.replica.leave(deadline)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use checkpoint::StateDict;
    use ftcore::TcpStoreServer;

    use super::*;

    /// A replica's rank as seen by [`InStep`]: what each quorum gives it, and what it said.
    #[derive(Default)]
    struct Scripted {
        /// Epoch, step, and why the rank did not come up.
        quorums: VecDeque<(u64, i64, Option<Error>)>,
        error: Option<Error>,
        votes: Vec<bool>,
    }

    impl Replica for Scripted {
        fn start_quorum(&mut self, _: &mut dyn State, _: Instant) -> Result<Participation> {
            let (epoch, step, error) = self.quorums.pop_front().ok_or_else(too_short)?;
            let contributes = error.is_none();
            self.error = error;
            Ok(Participation {
                epoch: Epoch(epoch),
                step: Step(step),
                replica_rank: 0,
                replica_world_size: 2,
                contributes,
                contributor_rank: None,
                contributors: 2,
                closes: false,
                healed: None,
                members: Default::default(),
            })
        }
        fn all_reduce(&mut self, _: Vec<Tensor>, _: ReduceOp) -> ManagedWork {
            panic!("no reduction in this test")
        }
        fn should_commit(&mut self, _: Instant) -> Result<bool> {
            self.votes.push(self.error.take().is_none());
            Ok(false)
        }
        fn current_step(&self) -> Step {
            Step(0)
        }
        fn batches_committed(&self) -> i64 {
            0
        }
        fn draining(&self) -> bool {
            false
        }
        fn progress(&self) {}
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

    #[derive(Default)]
    struct Values(Vec<f32>);

    impl State for Values {
        fn save(&self, out: &mut StateDict) -> Result<()> {
            out.insert_f32("values", &[self.0.len()], &self.0)
        }
        fn load(&mut self, from: &StateDict) -> Result<()> {
            self.0 = from.get_f32("values")?;
            Ok(())
        }
    }

    /// Runs `body` as each of two ranks that have met.
    fn as_two<T: Send>(body: impl Fn(Arc<Ranks>) -> T + Sync) -> [T; 2] {
        let store = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let as_rank = |rank| {
            let env = ReplicaEnv {
                lighthouse: "http://127.0.0.1:9".into(),
                replica: 0,
                replicas: 1,
                incarnation: 0,
                rank,
                ranks: 2,
                store: Some(store.local_addr().to_string()),
            };
            body(Ranks::meet(&env, None, &Device::CPU, &GroupOptions::default()).unwrap())
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| as_rank(1));
            [as_rank(0), other.join().unwrap()]
        })
    }

    #[test]
    fn the_ranks_of_a_replica_get_the_mean_of_gradients_and_loss() {
        let means = as_two(|ranks| {
            let own = ranks.rank() as f32;
            let mut gradients = vec![vec![own, 2.0], Vec::new(), vec![-4.0 * own]];
            let mut loss = 3.0 + own;
            ranks.average(&mut gradients, &mut loss).unwrap();
            (gradients, loss)
        });
        let expected = (vec![vec![0.5, 2.0], Vec::new(), vec![-2.0]], 3.5);
        assert_eq!(means, [expected.clone(), expected]);
    }

    #[test]
    fn a_quorum_that_one_rank_did_not_come_up_in_is_given_up_by_all_ranks() {
        let gone = || Error::new(ErrorKind::PeerLost, "the source is gone");
        let seen = as_two(|ranks| {
            // In epoch 1 rank 0 heals to step 5 and rank 1 does not; in epoch 2 rank 0 does not come up; in epoch 3 they hold different steps.
            let quorums = match ranks.rank() {
                0 => [(1, 5, None), (2, 5, Some(gone())), (3, 5, None), (4, 6, None)],
                _ => [(1, 5, Some(gone())), (2, 5, None), (3, 4, None), (4, 6, None)],
            };
            let scripted = Scripted {
                quorums: quorums.into(),
                ..Scripted::default()
            };
            let mut replica = InStep::new(scripted, ranks);
            let deadline = deadline_in(Duration::from_secs(60));
            let got = replica.start_quorum(&mut Values::default(), deadline).unwrap();
            (got.epoch.0, got.step.0, replica.replica.votes)
        });
        let expected = (4, 6, vec![false; 3]);
        assert_eq!(seen, [expected.clone(), expected]);
    }

    #[test]
    fn a_rank_that_is_gone_is_an_error_of_the_others_at_once() {
        let begun = Instant::now();
        let [_, error] = as_two(|ranks| {
            (ranks.rank() == 1).then(|| ranks.average(&mut [vec![1.0]], &mut 0.0).unwrap_err())
        });
        let error = error.unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert!(begun.elapsed() < INSIDE, "{:?}", begun.elapsed());
    }
}

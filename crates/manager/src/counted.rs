//! Contributor counts and averages over backends that have neither in their frames (INV-4): a vendor's or a plugin's group that only sums.
//!
//! An all-reduce becomes two of the inner group: the sum, to which a rank that does not contribute brings zeros, and one integer,
//! the number of those that do. The average divides by exactly that.
//!
//! Memory of a device is written through its copies only (`place`): zeros and the count go in, in the order of the call's stream, and an average
//! is divided on the host, on a thread of its own (`ox-counted`), because completions must not block.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ftcore::float_mode::DefaultMode;
use ftcore::{
    Capabilities, Checked, Collective, Completer, Completion, DType, DTypeSet, Error, ErrorKind, Failed,
    Feature, ProcessGroup, ProcessGroupExt, ReduceOp, Rejected, Result, SubmitOptions, Tensor, Work, Wrapper,
    deadline_in, execute_by_submit, work_pair,
};

use place::Place;

mod place;

/// Averages of these are composed.
const AVERAGED: [DType; 2] = [DType::F32, DType::F64];
/// What contributors are counted in, the first that the backend sums. A float counts exactly up to 2^24 replicas.
const COUNTS: [DType; 4] = [DType::I32, DType::I64, DType::U32, DType::F32];

/// `group` itself if it counts contributors and averages f32, otherwise behind a [`CountedGroup`], if it can sum at all.
/// `timeout` is that of calls that name no deadline.
pub(crate) fn counted(group: Arc<dyn ProcessGroup>, timeout: Duration) -> Arc<dyn ProcessGroup> {
    let offered = group.capabilities();
    let complete = offered.has(Feature::Contributors) && offered.reduces(ReduceOp::Avg, DType::F32);
    let count = COUNTS.into_iter().find(|&d| offered.reduces(ReduceOp::Sum, d));
    match count {
        Some(count) if !complete => Arc::new(CountedGroup::new(group, count, timeout)),
        _ => group,
    }
}

struct CountedGroup {
    inner: Arc<dyn ProcessGroup>,
    count: DType,
    timeout: Duration,
    capabilities: Capabilities,
    /// The two reductions of one call are neighbours in the order that all ranks share.
    order: Mutex<()>,
    /// To the thread that completes calls on a device, once there was one. It ends when the group and its calls are gone.
    finisher: Mutex<Option<Sender<Finish>>>,
}

/// What completes a call.
type Finish = Box<dyn FnOnce() + Send>;

impl CountedGroup {
    fn new(inner: Arc<dyn ProcessGroup>, count: DType, timeout: Duration) -> Self {
        let mut capabilities = inner.capabilities().clone();
        let averaged = AVERAGED
            .iter()
            .filter(|&&d| capabilities.reduces(ReduceOp::Sum, d));
        let averaged = DTypeSet::of(&averaged.copied().collect::<Vec<_>>());
        if let Some(set) = capabilities.reduces.get_mut(usize::from(ReduceOp::Avg.code())) {
            *set = averaged;
        }
        capabilities.features = capabilities
            .features
            .with(Feature::Contributors)
            .without(Feature::Borrow);
        capabilities.notes.push((
            "all_reduce".into(),
            "contributors and averages by a second all-reduce of one number".into(),
        ));
        Self {
            inner,
            count,
            timeout,
            capabilities,
            order: Mutex::new(()),
            finisher: Mutex::new(None),
        }
    }

    /// The thread that completes calls on a device.
    fn finisher(&self) -> Result<Sender<Finish>> {
        let mut finisher = self.finisher.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = &*finisher {
            return Ok(sender.clone());
        }
        let (sender, calls) = channel::<Finish>();
        std::thread::Builder::new()
            .name("ox-counted".to_string())
            .spawn(move || calls.into_iter().for_each(|finish| finish()))
            .map_err(|e| Error::io("cannot start the thread ox-counted", e))?;
        Ok(finisher.insert(sender).clone())
    }

    /// What has to be there before the call: the place of the tensors, the number of this rank, and who completes the call.
    fn prepare(
        &self,
        tensors: &mut [Tensor],
        options: &SubmitOptions,
    ) -> Result<(Place, Tensor, Option<Sender<Finish>>)> {
        let place = Place::of(tensors, options.stream.as_ref())?;
        if !options.contribute {
            tensors.iter_mut().try_for_each(|t| place.zero(t))?;
        }
        let one = place.bring(number(self.count, options.contribute)?)?;
        let finisher = place.is_device().then(|| self.finisher()).transpose()?;
        Ok((place, one, finisher))
    }

    fn all_reduce(
        &self,
        mut tensors: Vec<Tensor>,
        op: ReduceOp,
        options: SubmitOptions,
    ) -> Result<Work, Box<Rejected>> {
        let inner_op = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        let (place, one, finisher) = match self.prepare(&mut tensors, &options) {
            Ok(prepared) => prepared,
            Err(error) => {
                let op = Collective::AllReduce { tensors, op };
                return Err(Box::new(Rejected { error, op }));
            }
        };
        let deadline = options.deadline.unwrap_or_else(|| deadline_in(self.timeout));
        let both = || SubmitOptions {
            contribute: true,
            stream: place.stream(options.stream.as_ref()),
            ..SubmitOptions::by(deadline)
        };
        let order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = Collective::AllReduce {
            tensors,
            op: inner_op,
        };
        let sum = self.inner.run(sum, both()).map_err(|mut rejected| {
            if let Collective::AllReduce { op: kind, .. } = &mut rejected.op {
                *kind = op;
            }
            rejected
        })?;
        let count = self.inner.run(
            Collective::AllReduce {
                tensors: vec![one],
                op: ReduceOp::Sum,
            },
            both(),
        );
        drop(order);
        let inner = self.inner.clone();
        let (work, completer) = work_pair(sum.kind(), deadline, move |reason| inner.abort(reason));
        match count {
            Ok(count) => {
                let call = Call {
                    sum,
                    count,
                    op,
                    place,
                };
                join(call, completer, finisher);
            }
            Err(rejected) => completer.fail(rejected.error, sum.recover()),
        }
        Ok(work)
    }
}

/// One or zero.
fn number(dtype: DType, contribute: bool) -> Result<Tensor> {
    let one = u8::from(contribute);
    match dtype {
        DType::I32 => Ok(Tensor::from_vec(vec![i32::from(one)])),
        DType::I64 => Ok(Tensor::from_vec(vec![i64::from(one)])),
        DType::U32 => Ok(Tensor::from_vec(vec![u32::from(one)])),
        DType::F32 => Ok(Tensor::from_vec(vec![f32::from(one)])),
        other => Err(Error::unsupported(format!(
            "contributors are not counted in {other}"
        ))),
    }
}

fn counted_in(tensor: &Tensor) -> Result<u32> {
    let wrong = || Error::new(ErrorKind::Protocol, "the number of contributors is not one");
    let first = match tensor.dtype() {
        DType::I32 => tensor.as_slice::<i32>()?.first().map(|&n| i64::from(n)),
        DType::I64 => tensor.as_slice::<i64>()?.first().copied(),
        DType::U32 => tensor.as_slice::<u32>()?.first().map(|&n| i64::from(n)),
        _ => tensor.as_slice::<f32>()?.first().map(|&n| n as i64),
    };
    first.and_then(|n| u32::try_from(n).ok()).ok_or_else(wrong)
}

/// Divides floats of the host, on every rank in the same mode (INV-3).
fn divide(bytes: &mut [u8], dtype: DType, by: u32) {
    let _mode = DefaultMode::set();
    divide_here(bytes, dtype, by);
}

/// In the thread's own mode. Not inlined, so that nothing of it can move out from between the two changes of the mode.
#[inline(never)]
fn divide_here(bytes: &mut [u8], dtype: DType, by: u32) {
    if dtype == DType::F64 {
        for value in bytes.as_chunks_mut::<8>().0 {
            *value = (f64::from_ne_bytes(*value) / f64::from(by)).to_ne_bytes();
        }
    } else {
        for value in bytes.as_chunks_mut::<4>().0 {
            *value = (f32::from_ne_bytes(*value) / by as f32).to_ne_bytes();
        }
    }
}

/// One call of the group: two of the inner one.
struct Call {
    sum: Work,
    count: Work,
    op: ReduceOp,
    place: Place,
}

impl Call {
    /// Both have ended.
    fn finish(&self) -> Result<Completion> {
        let contributors = counted_in(&self.place.fetch(self.count.take_tensor()?)?)?;
        let mut completion = self.sum.take()?;
        if self.op == ReduceOp::Avg && contributors > 0 {
            let divided = completion.tensors.iter_mut().try_for_each(|tensor| {
                let dtype = tensor.dtype();
                self.place
                    .rewrite(tensor, |bytes| divide(bytes, dtype, contributors))
            });
            if let Err(error) = divided {
                // A copy may still be writing into one of them (INV-8).
                for tensor in completion.tensors {
                    tensor.leak("a copy to the device did not end");
                }
                return Err(error);
            }
        }
        completion.contributors = contributors;
        Ok(completion)
    }
}

/// Completes the call when both reductions have ended, in whichever order they say so: there, or on the thread of `finisher`.
fn join(call: Call, completer: Completer, finisher: Option<Sender<Finish>>) {
    let works = [call.sum.clone(), call.count.clone()];
    let left = Arc::new((AtomicU8::new(2), Mutex::new(Some((call, completer)))));
    for work in works {
        let (left, finisher) = (left.clone(), finisher.clone());
        work.on_complete(move |_| {
            if left.0.fetch_sub(1, Ordering::AcqRel) != 1 {
                return;
            }
            let ended = left.1.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some((call, completer)) = ended else { return };
            let finish = move || match call.finish() {
                Ok(completion) => completer.succeed(completion),
                Err(error) => completer.fail(error, call.sum.recover()),
            };
            match finisher {
                // A thread that is gone drops the completer, which ends the work with an error.
                Some(thread) => drop(thread.send(Box::new(finish))),
                None => finish(),
            }
        });
    }
}

impl Wrapper for CountedGroup {
    fn inner(&self) -> &dyn ProcessGroup {
        &*self.inner
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
        match op.into_inner() {
            Collective::AllReduce {
                tensors,
                op: op @ (ReduceOp::Sum | ReduceOp::Avg),
            } => self.all_reduce(tensors, op, options),
            op => self.inner.run(op, options),
        }
    }

    fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
        execute_by_submit(self, op, options)
    }

    fn split(
        &self,
        color: Option<u32>,
        key: u32,
        deadline: Instant,
    ) -> Result<Option<Box<dyn ProcessGroup>>> {
        let child = self.inner.split(color, key, deadline)?;
        Ok(child
            .map(|c| Box::new(Self::new(Arc::from(c), self.count, self.timeout)) as Box<dyn ProcessGroup>))
    }
}

#[cfg(test)]
mod tests {
    use backend_gloo::GlooGroup;
    use ftcore::{Configuration, Device, Epoch, GroupOptions, InMemoryStore, Staged, Store, accelerator};
    use training_rig::CountedDevice;

    use super::*;

    fn gloo() -> Arc<dyn ProcessGroup> {
        Arc::new(GlooGroup::new("sums", GroupOptions::default()).unwrap())
    }

    /// A group that says it can only sum, and is held to that.
    struct OnlySums(Arc<dyn ProcessGroup>, Capabilities);

    impl OnlySums {
        fn new(group: Arc<dyn ProcessGroup>) -> Self {
            let mut capabilities = group.capabilities().clone();
            capabilities.features = capabilities
                .features
                .without(Feature::Contributors)
                .without(Feature::Borrow);
            capabilities.reduces[usize::from(ReduceOp::Avg.code())] = DTypeSet::NONE;
            Self(group, capabilities)
        }
    }

    impl Wrapper for OnlySums {
        fn inner(&self) -> &dyn ProcessGroup {
            &*self.0
        }

        fn capabilities(&self) -> &Capabilities {
            &self.1
        }

        fn submit(&self, op: Checked, options: SubmitOptions) -> Result<Work, Box<Rejected>> {
            assert!(options.contribute);
            self.0.submit(op, options)
        }

        fn execute(&self, op: Checked, options: SubmitOptions) -> Result<Completion, Box<Failed>> {
            self.0.execute(op, options)
        }

        fn split(&self, c: Option<u32>, k: u32, d: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
            self.0.split(c, k, d)
        }
    }

    fn soon() -> Instant {
        deadline_in(Duration::from_secs(30))
    }

    /// Runs `body` as each of `world` ranks, over gloo.
    fn ranks<T: Send>(world: u32, body: impl Fn(u32, &dyn ProcessGroup) -> T + Sync) -> Vec<T> {
        ranks_over(&|_| gloo(), world, body)
    }

    /// As above, over what `inner` makes for each rank.
    fn ranks_over<T: Send>(
        inner: &(dyn Fn(u32) -> Arc<dyn ProcessGroup> + Sync),
        world: u32,
        body: impl Fn(u32, &dyn ProcessGroup) -> T + Sync,
    ) -> Vec<T> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        std::thread::scope(|scope| {
            let started: Vec<_> = (0..world)
                .map(|rank| {
                    let (store, body) = (store.clone(), &body);
                    scope.spawn(move || {
                        let group = counted(Arc::new(OnlySums::new(inner(rank))), Duration::from_secs(30));
                        group
                            .configure(Configuration {
                                store,
                                prefix: "counted".to_string(),
                                name: "counted".to_string(),
                                epoch: Epoch(1),
                                rank,
                                world_size: world,
                                deadline: soon(),
                                cancel: Default::default(),
                            })
                            .unwrap();
                        body(rank, &*group)
                    })
                })
                .collect();
            started.into_iter().map(|s| s.join().unwrap()).collect()
        })
    }

    fn reduce(
        group: &dyn ProcessGroup,
        tensors: Vec<Tensor>,
        op: ReduceOp,
        contribute: bool,
    ) -> Result<Completion> {
        let options = SubmitOptions {
            contribute,
            ..SubmitOptions::by(soon())
        };
        let work = group
            .run(Collective::AllReduce { tensors, op }, options)
            .map_err(Error::from)?;
        work.wait(soon())?;
        work.take()
    }

    #[test]
    fn an_average_divides_by_those_that_contribute_and_not_by_the_world() {
        let all = ranks(3, |rank, group| {
            let mine = vec![
                Tensor::from_vec(vec![f32::from(rank as u8), 10.0]),
                Tensor::from_vec(vec![100.0f32]),
            ];
            let average = reduce(group, mine, ReduceOp::Avg, rank != 2).unwrap();
            let sum = reduce(
                group,
                vec![Tensor::from_vec(vec![7i64])],
                ReduceOp::Sum,
                rank == 1,
            )
            .unwrap();
            let mine = vec![Tensor::from_vec(vec![f64::from(rank), 1e300])];
            let wide = reduce(group, mine, ReduceOp::Avg, rank != 0).unwrap();
            group.shutdown(soon()).unwrap();
            (average, sum, wide)
        });
        for (average, sum, wide) in all {
            assert_eq!(wide.tensors[0].as_slice::<f64>().unwrap(), [1.5, 1e300]);
            assert_eq!(average.contributors, 2);
            assert_eq!(average.tensors[0].as_slice::<f32>().unwrap(), [0.5, 10.0]);
            assert_eq!(average.tensors[1].as_slice::<f32>().unwrap(), [100.0]);
            assert_eq!(sum.contributors, 1);
            assert_eq!(sum.tensors[0].as_slice::<i64>().unwrap(), [7]);
        }
    }

    #[test]
    fn on_a_device_a_rank_that_does_not_contribute_adds_nothing_and_the_others_are_divided_by() {
        let devices: Vec<CountedDevice> = (0..3).map(|_| CountedDevice::new()).collect();
        let at = |rank: u32| &devices[rank as usize];
        let staged = |rank| -> Arc<dyn ProcessGroup> {
            Arc::new(Staged::new(gloo(), &at(rank).device(), Duration::from_secs(30)).unwrap())
        };
        let on_host = |tensor: &Tensor| {
            let Device { kind, index } = tensor.device();
            let device = accelerator(kind).unwrap();
            let mut here = Tensor::zeros(tensor.dtype(), tensor.count());
            let stream = device.new_stream(*index, false).unwrap();
            device.copy_out(tensor, here.bytes_mut(), &*stream).unwrap();
            here.as_slice::<f32>().unwrap().to_vec()
        };
        let all = ranks_over(&staged, 3, |rank, group| {
            let mine = |values: &[f32]| at(rank).tensor(values);
            let averaged = vec![mine(&[rank as f32, 10.0]), mine(&[100.0])];
            let average = reduce(group, averaged, ReduceOp::Avg, rank != 2).unwrap();
            let sum = reduce(group, vec![mine(&[7.0])], ReduceOp::Sum, rank == 1).unwrap();
            group.shutdown(soon()).unwrap();
            let tensors: Vec<Vec<f32>> = average.tensors.iter().chain(&sum.tensors).map(on_host).collect();
            (average.contributors, sum.contributors, tensors)
        });
        for said in all {
            assert_eq!(said, (2, 1, vec![vec![0.5, 10.0], vec![100.0], vec![7.0]]));
        }
    }

    #[test]
    fn with_nobody_contributing_the_average_is_zero_and_says_so() {
        for completion in ranks(2, |_, group| {
            let done = reduce(group, vec![Tensor::from_vec(vec![3.0f64])], ReduceOp::Avg, false).unwrap();
            group.shutdown(soon()).unwrap();
            done
        }) {
            assert_eq!(completion.contributors, 0);
            assert_eq!(completion.tensors[0].as_slice::<f64>().unwrap(), [0.0]);
        }
    }

    #[test]
    fn what_is_not_composed_is_refused_and_gives_the_tensors_back() {
        ranks(1, |_, group| {
            let options = SubmitOptions::by(soon());
            let op = Collective::AllReduce {
                tensors: vec![Tensor::from_vec(vec![3i32])],
                op: ReduceOp::Avg,
            };
            let rejected = group.run(op, options).err().unwrap();
            assert_eq!(rejected.error.kind(), ErrorKind::Unsupported);
            assert_eq!(rejected.op.into_tensors().len(), 1);
        });
    }

    #[test]
    fn an_abort_ends_the_call_on_all_ranks() {
        let errors = ranks(2, |rank, group| {
            if rank == 1 {
                group.abort("enough");
                return None;
            }
            reduce(group, vec![Tensor::zeros(DType::F32, 1000)], ReduceOp::Avg, true).err()
        });
        assert!(errors[0].is_some());
    }

    #[test]
    fn inv8_memory_that_a_copy_may_still_write_into_is_not_given_back() {
        let device = CountedDevice::new();
        let sum = device.tensor(&[6.0, 4.0]);
        let count = device.tensor(&[2.0]);
        let place = Place::of(std::slice::from_ref(&sum), None).unwrap();
        let ended = |tensor| {
            let completion = Completion {
                tensors: vec![tensor],
                source: None,
                contributors: 2,
            };
            Work::finished(ftcore::OpKind::AllReduce, completion)
        };
        let call = Call {
            sum: ended(sum),
            count: ended(count),
            op: ReduceOp::Avg,
            place,
        };
        let before = ftcore::leaked_bytes();
        device.never_synchronize();
        assert_eq!(call.finish().unwrap_err().kind(), ErrorKind::Timeout);
        assert!(call.sum.recover().is_empty());
        drop(call);
        // Tests beside this one may leak, too.
        assert!(ftcore::leaked_bytes() >= before + 8);
        assert_eq!(device.in_use(), 8, "the sum's memory may be written to still");
    }

    #[test]
    fn inv3_a_mean_is_the_same_whatever_the_mode_of_the_thread_that_divides() {
        let divided = || {
            let mut bytes = [f32::MIN_POSITIVE.to_ne_bytes(), 1.0f32.to_ne_bytes()].concat();
            divide(std::hint::black_box(&mut bytes), DType::F32, 3);
            bytes
        };
        let usual = divided();
        assert_ne!(usual[..4], [0; 4], "it is a number below the normal ones");
        for mode in ftcore::float_mode::foreign::MODES {
            let other = ftcore::float_mode::foreign::with(mode, divided);
            assert_eq!(other, usual, "{mode:x}");
        }
    }

    #[test]
    fn a_group_that_counts_by_itself_is_left_alone() {
        let gloo: Arc<dyn ProcessGroup> = Arc::new(GlooGroup::new("g", GroupOptions::default()).unwrap());
        assert!(Arc::ptr_eq(
            &counted(gloo.clone(), Duration::from_secs(30)),
            &gloo
        ));
    }
}

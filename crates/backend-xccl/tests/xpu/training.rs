//! Training state that lives on the device: DiLoCo over a side stream, and checkpoints.

use std::sync::Arc;
use std::time::Instant;

use backend_gloo::GlooGroup;
use backend_xccl::xpu::{XpuStream, device_for_replica};
use checkpoint::{Snapshot, StateDict, StateTensor};
use diloco::{Diloco, DilocoConfig, Parameters, SliceParameters};
use ftcore::{
    Collective, Configuration, DType, Epoch, Error, GroupOptions, InMemoryStore, ProcessGroup,
    ProcessGroupExt, ReduceOp, Result, Store, Stream, SubmitOptions, Tensor, Traffic,
};
use manager::{ManagedWork, Participation, Replica, State};

use super::{Memory, Outcome, Rank, ensure, soon};

const SIZES: [usize; 3] = [700, 512, 33];

/// Parameters on the device. What DiLoCo reads and writes crosses on a stream of its own, through USM host memory.
struct OnDevice {
    memory: Memory,
    side: Arc<dyn Stream>,
    names: Vec<String>,
    tensors: Vec<Tensor>,
    host: Vec<Tensor>,
}

impl OnDevice {
    fn new(index: u32) -> Outcome<Self> {
        let memory = Memory::on(index)?;
        let host = |n: &usize| memory.xpu.alloc_host(index, DType::F32, &[*n]);
        Ok(Self {
            side: memory.stream()?,
            names: (0..SIZES.len()).map(|i| format!("p{i}")).collect(),
            tensors: SIZES
                .iter()
                .map(|n| memory.with(&vec![0.0; *n]))
                .collect::<Outcome<_>>()?,
            host: SIZES.iter().map(host).collect::<Result<_>>()?,
            memory,
        })
    }
}

impl Parameters for OnDevice {
    fn len(&self) -> usize {
        self.tensors.len()
    }
    fn name(&self, i: usize) -> &str {
        self.names.get(i).map_or("", String::as_str)
    }
    fn count(&self, i: usize) -> usize {
        self.tensors.get(i).map_or(0, Tensor::count)
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        let mut host = self
            .memory
            .xpu
            .alloc_host(self.memory.index, DType::F32, &[self.count(i)])?;
        self.memory
            .xpu
            .copy_out(&self.tensors[i], host.bytes_mut(), &*self.side)?;
        f(host.as_slice::<f32>()?);
        Ok(())
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        let host = &mut self.host[i];
        let xpu = &self.memory.xpu;
        xpu.copy_out(&self.tensors[i], host.bytes_mut(), &*self.side)?;
        f(host.as_mut_slice::<f32>()?);
        xpu.copy_in(host.bytes(), &mut self.tensors[i], &*self.side)
    }
}

/// A replica in a world of two in which nobody fails.
struct Member {
    group: GlooGroup,
    rank: u32,
    step: i64,
    error: Option<Error>,
}

impl Replica for Member {
    fn start_quorum(&mut self, _: &mut dyn State, _: Instant) -> Result<Participation> {
        Ok(Participation {
            epoch: 1,
            step: self.step,
            replica_rank: self.rank,
            replica_world_size: 2,
            contributes: true,
            healed: None,
            members: vec!["0".into(), "1".into()],
        })
    }
    fn allreduce(&mut self, tensors: Vec<Tensor>, op: ReduceOp) -> ManagedWork {
        let work = self
            .group
            .run(Collective::AllReduce { tensors, op }, SubmitOptions::by(soon()));
        ManagedWork::submitted(work.map_err(Error::from).expect("it is configured"))
    }
    fn should_commit(&mut self, _: Instant) -> Result<bool> {
        self.step += 1;
        Ok(true)
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

/// How many inner steps were made.
struct Walk(i64);

impl State for Walk {
    fn save(&self, out: &mut StateDict) -> Result<()> {
        out.insert_i64s("made", &[self.0])
    }
    fn load(&mut self, from: &StateDict) -> Result<()> {
        self.0 = from.get_i64s("made")?[0];
        Ok(())
    }
}

/// After twelve inner steps: the hash of what all replicas have in common, and this one's parameters by bits.
fn train<P: Parameters>(rank: u32, store: Arc<dyn Store>, params: P) -> Outcome<(String, Vec<Vec<u32>>)> {
    let group = GlooGroup::new("d", GroupOptions::default())?;
    group.configure(Configuration {
        store,
        prefix: "d".into(),
        name: "d".into(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: soon(),
    })?;
    let member = Member {
        group,
        rank,
        step: 0,
        error: None,
    };
    let config = DilocoConfig {
        sync_every: 4,
        fragments: 2,
        delay: 1,
        mixing: 0.5,
        ..DilocoConfig::default()
    };
    let layer = |name: &str| name[1..].parse().expect("a number");
    let mut diloco = Diloco::new(member, params, config, &layer)?;
    let mut walk = Walk(0);
    diloco.begin(&mut walk)?;
    for _ in 0..12 {
        walk.0 += 1;
        let at = walk.0 as f32 + 0.3 * rank as f32;
        let params = diloco.params_mut();
        for i in 0..params.len() {
            params.write(i, &mut |w| {
                for (k, w) in w.iter_mut().enumerate() {
                    *w -= (at * (k as f32 + 0.5) + i as f32).sin() * 0.1;
                }
            })?;
        }
        diloco.after_inner_step(&mut walk)?;
    }
    diloco.finish(&mut walk)?;
    let mut all = Vec::new();
    for i in 0..diloco.params().len() {
        diloco
            .params()
            .read(i, &mut |w| all.push(w.iter().map(|v| v.to_bits()).collect()))?;
    }
    Ok((diloco.global_hash(), all))
}

/// Two replica groups of one host, each on its device; and the same over plain vectors.
pub(crate) fn diloco_rounds(_: &Rank) -> Outcome {
    let both = |on_device: bool| -> Outcome<Vec<(String, Vec<Vec<u32>>)>> {
        let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2u32)
                .map(|rank| {
                    let store = store.clone();
                    scope.spawn(move || {
                        if on_device {
                            let device = device_for_replica(rank)?;
                            ensure(device.index == rank, || format!("{device}"))?;
                            return train(rank, store, OnDevice::new(device.index)?);
                        }
                        let plain = SIZES
                            .iter()
                            .zip(0..)
                            .map(|(n, i)| (format!("p{i}"), vec![0.0; *n]));
                        train(rank, store, SliceParameters::new(plain.collect()))
                    })
                })
                .collect();
            ranks.into_iter().map(|r| r.join().expect("no panic")).collect()
        })
    };
    let (device, host) = (both(true)?, both(false)?);
    ensure(device[0].0 == device[1].0, || "the replicas ended apart".into())?;
    ensure(device[0].1.iter().flatten().any(|bits| *bits != 0), || {
        "nothing was trained".into()
    })?;
    ensure(device == host, || "device memory changed bits".into())
}

/// The training stream copies the parameters aside and goes on at once; a side stream carries that copy to the host and to disk.
pub(crate) fn snapshot(_: &Rank) -> Outcome {
    const COUNT: usize = 2 << 20;
    let memory = Memory::on(0)?;
    let (training, side) = (XpuStream::of(0)?, XpuStream::of(0)?);
    let old: Vec<f32> = (0..COUNT).map(|i| i as f32).collect();
    let (first, second) = (memory.with(&old)?, memory.with(&vec![-1.0; COUNT])?);
    let (mut params, mut aside) = (memory.empty(COUNT)?, memory.empty(COUNT)?);
    training.copy(&first, &mut params)?;
    training.copy(&params, &mut aside)?;
    let taken = training.record()?;
    // The next steps of the training, none of which waits for the checkpoint.
    for _ in 0..8 {
        training.copy(&second, &mut params)?;
    }
    side.wait(&*taken)?;
    let mut host = memory.xpu.alloc_host(0, DType::F32, &[COUNT])?;
    memory.xpu.copy_out(&aside, host.bytes_mut(), &side)?;
    let mut state = StateDict::new();
    state.insert(
        "params",
        StateTensor::new(DType::F32, vec![COUNT], host.bytes().to_vec())?,
    )?;
    let snapshot = Snapshot::new(1, 1, &state)?;
    let file = std::env::temp_dir().join(format!("oxccl-xpu-{}.safetensors", std::process::id()));
    checkpoint::save(&file, &state)?;
    let back = checkpoint::load(&file);
    std::fs::remove_file(&file)?;
    let back = back?.get_f32("params")?;
    ensure(snapshot.bytes().len() > 4 * COUNT && back == old, || {
        "the checkpoint is not what the device held".into()
    })?;
    // It heals: into the device again, behind what the training still has to do.
    let bytes: Vec<u8> = back.iter().flat_map(|v| v.to_ne_bytes()).collect();
    let now = memory.read(&params, &training)?;
    ensure(now.iter().all(|v| *v == -1.0), || {
        "the training did not go on".into()
    })?;
    memory.xpu.copy_in(&bytes, &mut params, &training)?;
    ensure(memory.read(&params, &training)? == old, || {
        "it was not restored".into()
    })
}

//! Training state that lives on the device: DiLoCo over a side stream, and checkpoints.

use std::sync::Arc;

use backend_xccl::xpu::{XpuStream, device_for_replica};
use checkpoint::{Snapshot, StateDict, StateTensor};
use diloco::{Backup, Diloco, DilocoConfig, Parameters, SliceParameters, TensorParameters};
use ftcore::{DType, Device, Epoch, Result, Step, Store, Stream, Tensor};
use manager::State;
use training_rig::{ScriptedReplica, gloo, ranks};

use super::{Memory, Outcome, Rank, ensure};

const SIZES: [usize; 3] = [700, 512, 33];

/// The parameters, all zero, each by its name.
fn named<T>(zeros: impl Fn(usize) -> Outcome<T>) -> Outcome<Vec<(String, T)>> {
    let one = |(i, n): (usize, &usize)| Ok((format!("p{i}"), zeros(*n)?));
    SIZES.iter().enumerate().map(one).collect()
}

/// Parameters on the device. What DiLoCo reads and writes crosses on a stream of its own, through USM host memory.
fn on_device(index: u32) -> Outcome<TensorParameters> {
    let memory = Memory::on(index)?;
    let tensors: Vec<(String, Tensor)> = named(|n| memory.with(&vec![0.0; n]))?;
    Ok(TensorParameters::new(tensors, Some(memory.stream()?))?)
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

/// What a replica ends with: the hash of what all have in common, its parameters by bits, and where its backup copies lie.
type Ended = (String, Vec<Vec<u32>>, Device);

/// Twelve inner steps, which differ from rank to rank.
fn train<P: Parameters>(rank: u32, store: &Arc<dyn Store>, params: P, backup: Backup) -> Outcome<Ended> {
    let member = ScriptedReplica::connected(gloo(1, store, (rank, 2)), (rank, 2));
    let config = DilocoConfig {
        sync_every: 4,
        fragments: 2,
        delay: 1,
        mixing: 0.5,
        backup,
        ..DilocoConfig::default()
    };
    let layer = |name: &str| name[1..].parse().expect("a number");
    let mut diloco = Diloco::with_layers(member, params, config, &layer)?;
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
    let lies = diloco.backup_device().clone();
    Ok((diloco.global_hash()?, all, lies))
}

/// Two replica groups of one host, each on its device, with backup copies on the host and on the device; and the same over plain vectors.
pub(crate) fn diloco_rounds(_: &Rank) -> Outcome {
    let both = |device: Option<Backup>| -> Outcome<Vec<Ended>> {
        ranks(2, |rank, store| {
            let Some(backup) = device else {
                let plain = SliceParameters::new(named(|n| Ok(vec![0.0; n]))?);
                return train(rank, store, plain, Backup::Host);
            };
            let own = device_for_replica(rank)?;
            ensure(own.index == rank, || format!("{own}"))?;
            let ended = train(rank, store, on_device(own.index)?, backup)?;
            let wanted = if backup == Backup::Device {
                own
            } else {
                Device::CPU
            };
            ensure(ended.2 == wanted, || {
                format!("the backup lies on {}, not on {wanted}", ended.2)
            })?;
            Ok(ended)
        })
        .into_iter()
        .collect()
    };
    let host = both(None)?;
    ensure(host[0].0 == host[1].0, || "the replicas ended apart".into())?;
    ensure(host[0].1.iter().flatten().any(|bits| *bits != 0), || {
        "nothing was trained".into()
    })?;
    for backup in [Backup::Host, Backup::Device] {
        let device = both(Some(backup))?;
        let same = device
            .iter()
            .zip(&host)
            .all(|(d, h)| (&d.0, &d.1) == (&h.0, &h.1));
        ensure(same, || {
            format!("device memory changed bits, with the backup in {backup}")
        })?;
    }
    Ok(())
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
    let snapshot = Snapshot::new(Step(1), Epoch(1), &state)?;
    let file = std::env::temp_dir().join(format!("oxccl-xpu-{}.safetensors", std::process::id()));
    checkpoint::save(&file, &state)?;
    let back = checkpoint::load(&file);
    std::fs::remove_file(&file)?;
    let back = back?.get_f32("params")?;
    ensure(
        snapshot.manifest().total_bytes() > 4 * COUNT as u64 && back == old,
        || "the checkpoint is not what the device held".into(),
    )?;
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

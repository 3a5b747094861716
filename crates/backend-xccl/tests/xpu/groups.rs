//! Groups and devices: who is chosen, what is refused, what is isolated.

use std::sync::Arc;

use backend_xccl::xpu::{alloc_shared, device_for_replica};
use backend_xccl::{XcclXpuFactory, XpuGroup};
use ftcore::registry::{BackendFactory, Registry};
use ftcore::{
    Collective, Configuration, DType, Device, DeviceKind, Epoch, ErrorKind, GroupOptions, InMemoryStore,
    OpKind, ProcessGroup, ProcessGroupExt, ReduceOp, Staged, Store, SubmitOptions, accelerator,
};
use isolate::{IsolateOptions, IsolatedGroup};

use super::{Memory, Outcome, Rank, configuration, ensure, group, soon};

pub(crate) fn registry(rank: &Rank) -> Outcome {
    let registry = Registry::global();
    let name = Registry::default_backend(&DeviceKind::Xpu)?;
    ensure(name == "xccl", || format!("the default is {name}"))?;
    registry.is_backend_available(&name, Some(&DeviceKind::Xpu))?;
    let device = Device::new(DeviceKind::Xpu, 0);
    let group = registry.create(&name, &device, &GroupOptions::default())?;
    group.configure(configuration(rank, 1, 1))?;
    ensure(
        group.info().device == device && &*group.info().backend == "xccl",
        || format!("{:?}", group.info()),
    )?;
    let words = XcclXpuFactory.library().unwrap_or_default();
    ensure(
        words.contains("oneCCL 2022") && words.contains("dpctl") && words.contains("stand-in"),
        || words.clone(),
    )?;
    let other = Device::new(DeviceKind::Xpu, 7);
    let e = registry
        .create(&name, &other, &GroupOptions::default())
        .err()
        .expect("no such device");
    ensure(e.to_string().contains("the last of them is xpu:0"), || {
        format!("{e}")
    })
}

pub(crate) fn turns(rank: &Rank) -> Outcome {
    let xpu = accelerator(&DeviceKind::Xpu)?;
    ensure(xpu.count() == 2, || format!("{} devices", xpu.count()))?;
    let picked: Vec<u32> = (0..4)
        .map(|replica| Ok(device_for_replica(replica)?.index))
        .collect::<Outcome<_>>()?;
    ensure(picked == [0, 1, 0, 1], || format!("{picked:?}"))?;
    // The third and the fourth replica group of a host with two devices, as one world.
    let device = device_for_replica(rank.rank + 2)?;
    let group = group(rank, device.index)?;
    let memory = Memory::on(device.index)?;
    let stream = memory.stream()?;
    let sum = group
        .all_reduce(memory.with(&[rank.rank as f32; 99])?, ReduceOp::Sum)?
        .take_tensor()?;
    ensure(
        *sum.device() == device && memory.read(&sum, &*stream)? == [1.0; 99],
        || format!("on {}", sum.device()),
    )?;
    // Memory of one device is not another's.
    let elsewhere = Memory::on(1 - device.index)?;
    let refused = group.all_reduce(elsewhere.with(&[1.0])?, ReduceOp::Sum);
    let e = refused.expect_err("memory of another device");
    ensure(e.error.kind() == ErrorKind::InvalidArgument, || format!("{e}"))?;
    let e = xpu
        .copy_out(&sum, &mut [0; 396], &*elsewhere.stream()?)
        .expect_err("a stream of another device");
    ensure(e.kind() == ErrorKind::InvalidArgument, || format!("{e}"))?;
    Ok(group.shutdown(soon())?)
}

pub(crate) fn messages(rank: &Rank) -> Outcome {
    let group = XpuGroup::new("x", &Device::new(DeviceKind::Xpu, 0), GroupOptions::default())?;
    group.configure(configuration(rank, 1, 1))?;
    let table = group.capabilities();
    ensure(
        !table.ops.contains(OpKind::Send) && !table.ops.contains(OpKind::Batch),
        || "messages are advertised".into(),
    )?;
    let note = table.notes.iter().find(|(op, _)| op == "send, recv");
    ensure(
        note.is_some_and(|(_, text)| text.contains("SIGSEGV") && text.contains("GPU")),
        || format!("{note:?}"),
    )?;
    let memory = Memory::on(0)?;
    let e = group.send(memory.with(&[1.0])?, 0, 0).expect_err("refused");
    ensure(e.error.kind() == ErrorKind::Unsupported, || format!("{e}"))
}

pub(crate) fn shared(rank: &Rank) -> Outcome {
    let group = group(rank, 0)?;
    let memory = Memory::on(0)?;
    let stream = memory.stream()?;
    let mut tensor = alloc_shared(0, DType::F32, &[500])?;
    let bytes: Vec<u8> = [rank.rank as f32 + 0.5; 500]
        .iter()
        .flat_map(|v| v.to_ne_bytes())
        .collect();
    memory.xpu.copy_in(&bytes, &mut tensor, &*stream)?;
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Avg,
    };
    let options = SubmitOptions {
        stream: Some(stream.clone()),
        ..SubmitOptions::by(soon())
    };
    let mean = group.run(op, options)?.take_tensor()?;
    ensure(memory.read(&mean, &*stream)? == [1.0; 500], || {
        "a wrong mean".into()
    })?;
    Ok(group.shutdown(soon())?)
}

pub(crate) fn plugin(_: &Rank) -> Outcome {
    let e = XcclXpuFactory
        .probe()
        .expect_err("it would read memory that is not ready");
    ensure(e.to_string().contains("CCL_PLUGIN is ONECCL_LEGACY_CPU"), || {
        format!("{e}")
    })
}

/// Two ranks as threads of one program, each with a child process that has a oneCCL on host memory; the tensors are on the xpu.
pub(crate) fn isolated_on_host(_: &Rank) -> Outcome {
    let memory = Memory::on(0)?;
    let host = memory.xpu.alloc_host(0, DType::F32, &[3])?;
    ensure(
        host.device().is_cpu() && host.as_slice::<f32>()?.len() == 3,
        || "USM host memory is the host's to use".into(),
    )?;
    both(|| {
        let inner = IsolatedGroup::new(IsolateOptions::new("xccl", Device::CPU))?;
        let limit = std::time::Duration::from_secs(30);
        Ok(Box::new(Staged::new(
            Arc::new(inner),
            &Device::new(DeviceKind::Xpu, 0),
            limit,
        )?))
    })
}

/// The same with a oneCCL on the xpu in each child: values go through the host of the parent and of the child.
pub(crate) fn isolated_on_device(_: &Rank) -> Outcome {
    both(|| isolate::open(IsolateOptions::new("xccl", Device::new(DeviceKind::Xpu, 0))))
}

fn both(make: impl Fn() -> ftcore::Result<Box<dyn ProcessGroup>> + Sync) -> Outcome {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2u32)
            .map(|rank| {
                let (store, make) = (store.clone(), &make);
                scope.spawn(move || one_isolated(rank, store, &*make()?))
            })
            .collect();
        ranks.into_iter().try_for_each(|r| r.join().expect("no panic"))
    })
}

fn one_isolated(rank: u32, store: Arc<dyn Store>, group: &dyn ProcessGroup) -> Outcome {
    let memory = Memory::on(0)?;
    for epoch in 1..=2 {
        group.configure(Configuration {
            store: store.clone(),
            prefix: "isolated".into(),
            name: "isolated".into(),
            epoch: Epoch(epoch),
            rank,
            world_size: 2,
            deadline: soon(),
            cancel: Default::default(),
        })?;
        let stream = memory.stream()?;
        let tensor = memory.with(&vec![rank as f32 + epoch as f32; 10_000])?;
        let op = Collective::AllReduce {
            tensors: vec![tensor],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(soon())
        };
        let sum = group.run(op, options)?.take_tensor()?;
        let want = 1.0 + 2.0 * epoch as f32;
        ensure(*sum.device() == memory.device(), || {
            "it came back elsewhere".into()
        })?;
        ensure(memory.read(&sum, &*stream)?.iter().all(|v| *v == want), || {
            format!("epoch {epoch}: a wrong sum")
        })?;
        // No rank's child goes while another one still needs what is on its way.
        store.barrier(&format!("done/{epoch}"), 2, soon())?;
        // What oneCCL itself cannot do: end, and begin again in the same program.
        group.abort("the epoch is over");
    }
    Ok(())
}

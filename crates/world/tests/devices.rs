//! `cpu:gloo,cuda:nccl` in one group: each tensor goes to the backend of its device, and both share a fate. NCCL and the CUDA driver are the
//! stand-in of `fixtures/nccl-standin`.

#[path = "../../backend-nccl/tests/standin/mod.rs"]
mod standin;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

// Links the backends and the device kind, which register themselves.
use backend_gloo as _;
use backend_nccl as _;
use ftcore::{
    Collective, DType, Device, DeviceKind, Error, ErrorKind, GroupOptions, InMemoryStore, OpKind,
    ProcessGroup, ProcessGroupExt, ReduceOp, Result, Store, SubmitOptions, Tensor, Work, accelerator,
    deadline_in,
};
use libtest_mimic::{Arguments, Trial};
use oxccl_world::{BackendSpec, GroupSpec, World, WorldOptions};

fn soon() -> Instant {
    deadline_in(Duration::from_secs(60))
}

fn cuda(index: u32) -> Device {
    Device::new(DeviceKind::Cuda, index)
}

fn fail(text: impl Into<String>) -> Error {
    Error::new(ErrorKind::Internal, text)
}

fn ensure(ok: bool, text: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(fail(text())) }
}

/// Two ranks with a device each, which begin once both are connected.
fn pair(body: fn(&World) -> Result<()>) -> Result<()> {
    pair_of("cpu:gloo,cuda:nccl", body)
}

fn pair_of(backends: &'static str, body: fn(&World) -> Result<()>) -> Result<()> {
    let store: Arc<dyn Store> = Arc::new(InMemoryStore::new());
    let results: Vec<Result<()>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..2)
            .map(|rank| {
                let store = store.clone();
                scope.spawn(move || {
                    let options = WorldOptions {
                        backends: backends.parse()?,
                        device: cuda(rank),
                        ..WorldOptions::default()
                    };
                    let world = World::with_store(store.clone(), rank, 2, options, soon())?;
                    // No rank ends it while the other still connects.
                    store.barrier("connected", 2, soon())?;
                    body(&world)
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|r| r.join().unwrap_or_else(|_| Err(fail("a rank panicked"))))
            .collect()
    });
    results.into_iter().collect()
}

/// One f32 on the device, and options by which an operation comes after the copy that puts it there.
fn on_device(device: &Device, value: f32) -> Result<(Tensor, SubmitOptions)> {
    let memory = accelerator(&device.kind)?;
    let stream = memory.new_stream(device.index, false)?;
    let mut tensor = memory.alloc(device.index, DType::F32, &[1])?;
    memory.copy_in(&value.to_ne_bytes(), &mut tensor, &*stream)?;
    let options = SubmitOptions {
        stream: Some(stream),
        ..SubmitOptions::by(soon())
    };
    Ok((tensor, options))
}

fn value(tensor: &Tensor) -> Result<f32> {
    let device = tensor.device();
    let memory = accelerator(&device.kind)?;
    let mut bytes = [0u8; 4];
    memory.copy_out(tensor, &mut bytes, &*memory.new_stream(device.index, false)?)?;
    Ok(f32::from_ne_bytes(bytes))
}

fn sums(group: &dyn ProcessGroup, device: &Device, mine: f32) -> Result<(f32, f32)> {
    let (tensor, options) = on_device(device, mine)?;
    let op = Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Sum,
    };
    let there = group.run(op, options)?.take_tensor()?;
    let here = group
        .all_reduce(Tensor::from_vec(vec![mine * 10.0]), ReduceOp::Sum)?
        .take_tensor()?;
    Ok((value(&there)?, value(&here)?))
}

fn each_to_its_own() -> Result<()> {
    pair(|world| {
        let (group, device) = (world.group(), cuda(world.rank()));
        ensure(&*group.info().backend == "cpu:gloo,cuda:nccl", || {
            group.info().backend.to_string()
        })?;
        let found = sums(group, &device, world.rank() as f32 + 1.0)?;
        ensure(found == (3.0, 30.0), || format!("{found:?}"))?;
        ensure(group.traffic().sent > 0, || "nothing was sent".into())?;
        group.barrier()?;
        for splits in [[0, 1], [1, 0]] {
            let child = world
                .new_group(&splits, &GroupSpec::default(), soon())?
                .ok_or_else(|| fail("this rank is in no group"))?;
            let found = sums(&*child, &device, world.rank() as f32)?;
            ensure(found == (1.0, 10.0), || format!("{found:?}"))?;
            child.shutdown(soon())?;
        }
        // The group on the host beside it, of the gloo member alone.
        let spec = GroupSpec {
            backends: Some("cpu:gloo".parse()?),
            ..GroupSpec::default()
        };
        let beside = world
            .new_group(&[0, 1], &spec, soon())?
            .ok_or_else(|| fail("this rank is in no group"))?;
        let info = beside.info();
        ensure(
            (&*info.backend, &info.device) == ("cpu:gloo", &Device::CPU),
            || format!("{info:?}"),
        )?;
        let summed = beside
            .all_reduce(Tensor::from_vec(vec![1f32]), ReduceOp::Sum)?
            .take_tensor()?;
        ensure(value(&summed)? == 2.0, || "the sum is wrong".into())?;
        beside.shutdown(soon())?;
        let child = group
            .split(Some(0), 1 - world.rank(), soon())?
            .ok_or_else(|| fail("this rank passed a colour"))?;
        ensure(child.info().rank == 1 - world.rank(), || {
            format!("{:?}", child.info())
        })?;
        let found = sums(&*child, &device, 1.0)?;
        ensure(found == (2.0, 20.0), || format!("{found:?}"))?;
        child.shutdown(soon())?;
        world.shutdown(soon())
    })
}

fn mixed_tensors_are_refused() -> Result<()> {
    pair(|world| {
        let device = cuda(world.rank());
        let tensors = vec![on_device(&device, 1.0)?.0, Tensor::from_vec(vec![1f32])];
        let op = Collective::AllReduce {
            tensors,
            op: ReduceOp::Sum,
        };
        let Err(rejected) = world.group().run(op, SubmitOptions::default()) else {
            return Err(fail("tensors of two devices were accepted"));
        };
        let e = &rejected.error;
        ensure(
            e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("one device kind"),
            || e.to_string(),
        )?;
        ensure(rejected.op.tensors().len() == 2, || "tensors were lost".into())?;
        world.shutdown(soon())
    })
}

fn what_one_backend_lacks_is_refused_by_its_name() -> Result<()> {
    pair(|world| {
        let group = world.group();
        // gloo reduces i16, NCCL does not.
        let here = group
            .all_reduce(Tensor::from_vec(vec![1i16]), ReduceOp::Sum)?
            .take_tensor()?;
        ensure(here.as_slice::<i16>()? == [2], || "i16 on the host".into())?;
        let device = cuda(world.rank());
        let there = accelerator(&device.kind)?.alloc(device.index, DType::I16, &[1])?;
        let Err(rejected) = group.all_reduce(there, ReduceOp::Sum) else {
            return Err(fail("NCCL took i16"));
        };
        let e = &rejected.error;
        ensure(
            e.kind() == ErrorKind::Unsupported && e.to_string().contains("nccl"),
            || e.to_string(),
        )?;
        ensure(group.capabilities().ops.contains(OpKind::AllReduce), || {
            "ops".into()
        })?;
        group.barrier()?;
        world.shutdown(soon())
    })
}

fn a_failure_of_one_ends_both_until_the_next_configuration() -> Result<()> {
    pair(|world| {
        let group = world.group();
        group.abort("enough");
        let Err(rejected) = group.all_reduce(Tensor::from_vec(vec![1f32]), ReduceOp::Sum) else {
            return Err(fail("an aborted group took an operation"));
        };
        ensure(rejected.error.kind() == ErrorKind::Poisoned, || {
            rejected.error.to_string()
        })?;
        let first = group.error().ok_or_else(|| fail("no error"))?;
        ensure(first.kind() == ErrorKind::Aborted, || first.to_string())
    })
}

fn options_are_refused_by_whoever_does_not_honour_them() -> Result<()> {
    let options = GroupOptions {
        cga_cluster_size: Some(2),
        ..GroupOptions::default()
    };
    let mut wanted = WorldOptions {
        backends: "cpu:gloo,cuda:nccl".parse::<BackendSpec>()?,
        device: cuda(0),
        options: options.clone(),
        ..WorldOptions::default()
    };
    let e = wanted
        .group("g")
        .err()
        .ok_or_else(|| fail("gloo took an option of NCCL's"))?;
    ensure(
        e.to_string().contains("'gloo' does not honour cga_cluster_size"),
        || e.to_string(),
    )?;
    wanted.options = GroupOptions::default();
    wanted.options_of.insert(DeviceKind::Cuda, options);
    wanted.group("g").map(drop)
}

/// What the group sends with this tag to the other rank after the copy that puts it on the device.
fn send_from_device(group: &dyn ProcessGroup, device: &Device, value: f32, tag: u32) -> Result<Work> {
    let (mut tensor, options) = on_device(device, -1.0)?;
    let memory = accelerator(&device.kind)?;
    let stream = options.stream.as_deref().ok_or_else(|| fail("no stream"))?;
    // The stream is far behind when the message is submitted.
    for n in 0..40 {
        let now = if n == 39 { value } else { -1.0 };
        memory.copy_in(&now.to_ne_bytes(), &mut tensor, stream)?;
    }
    let peer = 1 - group.info().rank;
    Ok(group.run(Collective::Send { tensor, peer, tag }, options)?)
}

/// A receive from any rank, and its value once a stream has waited for it.
fn receive_on_device(group: &dyn ProcessGroup, device: &Device, tag: u32) -> Result<f32> {
    let memory = accelerator(&device.kind)?;
    let tensor = memory.alloc(device.index, DType::F32, &[1])?;
    let work = group.recv_any(tensor, tag)?;
    let stream = memory.new_stream(device.index, false)?;
    work.wait_on(&*stream)?;
    let done = work.take()?;
    let (rank, source) = (group.info().rank, done.source);
    ensure(source == Some(1 - rank), || format!("it comes from {source:?}"))?;
    let mut bytes = [0u8; 4];
    memory.copy_out(&done.into_tensor()?, &mut bytes, &*stream)?;
    Ok(f32::from_ne_bytes(bytes))
}

/// Tags, in stream order, over NCCL; in a split group, too, and beside tensors of the host.
fn messages_have_tags() -> Result<()> {
    pair_of("cpu:gloo,cuda:nccl,messages:gloo", |world| {
        let (group, device) = (world.group(), cuda(world.rank()));
        ensure(
            &*group.info().backend == "cpu:gloo,cuda:nccl,messages:gloo",
            || group.info().backend.to_string(),
        )?;
        let child = group
            .split(Some(0), world.rank(), soon())?
            .ok_or_else(|| fail("this rank passed a colour"))?;
        for group in [group, &*child] {
            let mine = world.rank() as f32 * 100.0;
            let host = group.send(Tensor::from_vec(vec![mine + 50.0]), 1 - world.rank(), 50)?;
            let sent: Vec<Work> = (0..20)
                .map(|tag| send_from_device(group, &device, mine + tag as f32, tag))
                .collect::<Result<_>>()?;
            let theirs = 100.0 - mine;
            for tag in (0..20).rev() {
                let got = receive_on_device(group, &device, tag)?;
                ensure(got == theirs + tag as f32, || format!("tag {tag} brought {got}"))?;
            }
            let got = group.recv_any(Tensor::zeros(DType::F32, 1), 50)?.take_tensor()?;
            ensure(value(&got)? == theirs + 50.0, || "the host's message".into())?;
            host.wait(soon())?;
            sent.iter().try_for_each(|work| work.wait(soon()))?;
        }
        child.shutdown(soon())?;
        world.shutdown(soon())
    })
}

fn both_ends_of_a_message_are_on_one_device_kind() -> Result<()> {
    pair_of("cpu:gloo,cuda:nccl,messages:gloo", |world| {
        let (group, device) = (world.group(), cuda(world.rank()));
        let work = match world.rank() {
            0 => send_from_device(group, &device, 1.0, 3)?,
            _ => group.recv(Tensor::zeros(DType::F32, 1), 0, 3)?,
        };
        let error = work.wait(soon()).err().ok_or_else(|| fail("it arrived"))?;
        let text = error.to_string();
        ensure(
            error.kind() == ErrorKind::Mismatch && text.contains("on cuda") && text.contains("on cpu"),
            || text.clone(),
        )
    })
}

fn main() -> ExitCode {
    standin::or_restart(&[("OXCCL_STANDIN_CUDA_DELAY_US", "50")]);
    let trial = |name: &str, body: fn() -> Result<()>| {
        Trial::test(name, move || body().map_err(|e| e.to_string().into()))
    };
    let trials = vec![
        trial("each_tensor_goes_to_the_backend_of_its_device", each_to_its_own),
        trial(
            "tensors_of_two_devices_in_one_call_are_refused",
            mixed_tensors_are_refused,
        ),
        trial(
            "what_one_backend_lacks_is_refused_by_its_name",
            what_one_backend_lacks_is_refused_by_its_name,
        ),
        trial(
            "messages_that_gloo_matches_have_tags_in_stream_order",
            messages_have_tags,
        ),
        trial(
            "both_ends_of_a_matched_message_are_on_one_device_kind",
            both_ends_of_a_message_are_on_one_device_kind,
        ),
        trial(
            "a_failure_of_one_ends_both",
            a_failure_of_one_ends_both_until_the_next_configuration,
        ),
        trial(
            "inv9_options_are_refused_by_whoever_does_not_honour_them",
            options_are_refused_by_whoever_does_not_honour_them,
        ),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

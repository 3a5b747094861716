//! What works, beyond the conformance suite: all small sizes, large copies, the device kind, order between streams.

use oxccl_hccl::HpuAccelerator;
use oxccl_hccl::ftcore::registry::BackendFactory;
use oxccl_hccl::ftcore::{
    Accelerator, Collective, DType, Device, DeviceKind, ErrorKind, GroupOptions, ProcessGroup,
    ProcessGroupExt, ReduceOp, Status, SubmitOptions, Tensor,
};

use crate::ranks::{Outcome, Rank, Scenario, ensure, scenario, text, within};

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario(
            "l17_every_size_up_to_16_of_every_dtype_and_operation",
            3,
            small_sizes,
        ),
        scenario("copies_of_many_pieces_arrive_whole", 1, large_copies),
        scenario("the_device_kind_answers_for_one_device", 1, device),
        scenario(
            "l09_work_starts_after_its_stream_and_streams_wait_for_work",
            2,
            stream_order,
        ),
        scenario("a_message_waits_for_nobody_but_its_peer", 3, messages),
        scenario("a_message_waits_for_nobody_but_its_peer_among_many", 6, messages),
        scenario("memory_is_used_again_only_after_its_tensor_is_gone", 1, memory),
        scenario("the_factory_says_what_it_found", 1, factory),
    ]
}

/// Differential: against a fold on the host, in integers that every type holds exactly.
fn small_sizes(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let value = |r: u32, i: usize| ((r as usize * 7 + i * 3) % 11) as i32;
    for op in [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max] {
        for count in 0..=16usize {
            let want: Vec<i32> = (0..count)
                .map(|i| {
                    let all = (0..rank.world).map(|r| value(r, i));
                    match op {
                        ReduceOp::Min => all.min(),
                        ReduceOp::Max => all.max(),
                        _ => Some(all.sum()),
                    }
                    .unwrap_or(0)
                })
                .collect();
            let own: Vec<i32> = (0..count).map(|i| value(rank.rank, i)).collect();
            let sum = group.all_reduce(rank.tensor(&own)?, op).map_err(text)?;
            let got = rank.read::<i32>(&sum.take_tensor().map_err(text)?)?;
            ensure!(got == want, "i32 {op} of {count}: {got:?}, expected {want:?}");
            let own: Vec<u32> = own.iter().map(|v| *v as u32).collect();
            let sum = group.all_reduce(rank.tensor(&own)?, op).map_err(text)?;
            let got = rank.read::<u32>(&sum.take_tensor().map_err(text)?)?;
            ensure!(
                got.iter().map(|v| *v as i32).eq(want.iter().copied()),
                "u32 {op} of {count}: {got:?}, expected {want:?}"
            );
            let own: Vec<f32> = own.iter().map(|v| *v as f32).collect();
            let sum = group.all_reduce(rank.tensor(&own)?, op).map_err(text)?;
            let got = rank.read::<f32>(&sum.take_tensor().map_err(text)?)?;
            ensure!(
                got.iter().map(|v| *v as i32).eq(want.iter().copied()),
                "f32 {op} of {count}: {got:?}, expected {want:?}"
            );
        }
    }
    group.shutdown(rank.soon()).map_err(text)
}

fn large_copies(rank: &Rank) -> Outcome {
    for count in [0usize, 1, 1 << 20, (1 << 20) + 1, 5_000_001] {
        let data: Vec<u32> = (0..count as u32).map(|i| i.wrapping_mul(2_654_435_761)).collect();
        let tensor = rank.tensor(&data)?;
        ensure!(tensor.count() == count, "{} of {count} elements", tensor.count());
        ensure!(
            rank.read::<u32>(&tensor)? == data,
            "{count} elements came back otherwise"
        );
    }
    Ok(())
}

fn device(rank: &Rank) -> Outcome {
    let hpu = HpuAccelerator;
    ensure!(hpu.count() == 1, "{} devices in one process", hpu.count());
    ensure!(hpu.kind() == DeviceKind::Hpu, "{}", hpu.kind());
    let name = hpu.name(0).map_err(text)?;
    ensure!(name.contains("stand-in"), "the device is called {name}");
    hpu.set(0).map_err(text)?;
    ensure!(hpu.current().map_err(text)? == 0, "another device is current");
    for refused in [
        hpu.set(1),
        hpu.name(1).map(drop),
        hpu.alloc(1, DType::F32, &[1]).map(drop),
        hpu.new_stream(1, false).map(drop),
    ] {
        let Err(e) = refused else {
            return Err("there is no hpu:1".to_string());
        };
        ensure!(e.kind() == ErrorKind::InvalidArgument, "{e}");
    }
    let Err(e) = hpu.new_stream(0, true) else {
        return Err("a stream of high priority was promised".to_string());
    };
    ensure!(e.kind() == ErrorKind::Unsupported, "{e}");
    for (dtype, count) in [(DType::F64, usize::MAX / 4), (DType::U8, usize::MAX - 5)] {
        let Err(e) = hpu.alloc(0, dtype, &[count]) else {
            return Err("too much memory was given".to_string());
        };
        ensure!(e.kind() == ErrorKind::InvalidArgument, "{e}");
    }
    // Lengths and places are checked before anything is copied.
    let stream = hpu.new_stream(0, false).map_err(text)?;
    let mut tensor = rank.any(DType::F32)?;
    ensure!(
        hpu.copy_in(&[0; 15], &mut tensor, &*stream).is_err(),
        "15 bytes fit into 16"
    );
    ensure!(
        hpu.copy_out(&tensor, &mut [0; 17], &*stream).is_err(),
        "16 bytes fill 17"
    );
    let host = Tensor::zeros(DType::F32, 4);
    ensure!(
        hpu.copy_out(&host, &mut [0; 16], &*stream).is_err(),
        "host memory was taken for the device's"
    );
    hpu.synchronize(0, rank.soon()).map_err(text)?;
    // A tensor of the host, or of another device, is refused before it gets to the library.
    let group = rank.group()?;
    let Err(rejected) = group.all_reduce(host, ReduceOp::Sum) else {
        return Err("host memory was accepted".to_string());
    };
    ensure!(
        rejected.error.kind() == ErrorKind::InvalidArgument,
        "{}",
        rejected.error
    );
    Ok(())
}

/// A stream waits for a message that has not been sent; what is submitted after that stream must not run before.
fn stream_order(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    if rank.rank == 1 {
        rank.meet("nothing ran ahead")?;
        let sent = group.send(rank.tensor(&[5.0f32; 4])?, 0, 0).map_err(text)?;
        sent.wait_done().map_err(text)?;
        return group.shutdown(rank.soon()).map_err(text);
    }
    let stream = HpuAccelerator.new_stream(0, false).map_err(text)?;
    let message = group.recv(rank.any(DType::F32)?, 1, 0).map_err(text)?;
    // Returns as soon as the receive is on the device: the stream waits, not the host.
    message.wait_on(&*stream).map_err(text)?;
    ensure!(
        matches!(message.status(), Status::Pending),
        "the message is here before it was sent"
    );
    let alone = rank.group_of_one()?;
    let options = SubmitOptions {
        stream: Some(stream.clone()),
        ..SubmitOptions::by(rank.soon())
    };
    let behind = alone.run(Collective::Barrier, options).map_err(text)?;
    ensure!(
        behind.wait(within(300)).is_err(),
        "an operation ran before the stream that it was to come after"
    );
    ensure!(
        !stream.query().map_err(text)?,
        "a stream that waits says that it is idle"
    );
    rank.meet("nothing ran ahead")?;
    behind.wait_done().map_err(text)?;
    stream.synchronize(rank.soon()).map_err(text)?;
    let received = message.take_tensor().map_err(text)?;
    let data = rank.read::<f32>(&received)?;
    ensure!(data == [5.0; 4], "rank 1 sent {data:?}");
    group.shutdown(rank.soon()).map_err(text)
}

/// Rank 0 waits for rank 1, which is slow to come; what it has to do with the last rank goes on.
fn messages(rank: &Rank) -> Outcome {
    let group = rank.group()?;
    let receive = |peer| -> Outcome<_> { group.recv(rank.any(DType::F32)?, peer, 0).map_err(text) };
    let last = rank.world - 1;
    match rank.rank {
        0 => {
            let slow = receive(1)?;
            let quick = receive(last)?;
            let got = quick.take().map_err(text)?;
            ensure!(got.source == Some(last), "the source is {:?}", got.source);
            ensure!(
                matches!(slow.status(), Status::Pending),
                "the slow message is here before it was sent"
            );
            rank.meet("quick is here")?;
            let got = slow.take().map_err(text)?;
            let data = rank.read::<f32>(&got.into_tensor().map_err(text)?)?;
            ensure!(data == [1.0; 4], "rank 1 sent {data:?}");
        }
        other if other == 1 || other == last => {
            if other == 1 {
                rank.meet("quick is here")?;
            }
            let sent = group.send(rank.tensor(&[other as f32; 4])?, 0, 0).map_err(text)?;
            if other == last {
                rank.meet("quick is here")?;
            }
            sent.wait_done().map_err(text)?;
        }
        _ => rank.meet("quick is here")?,
    }
    group.shutdown(rank.soon()).map_err(text)
}

fn memory(rank: &Rank) -> Outcome {
    let first = rank.tensor(&[1.0f32; 100])?;
    let second = rank.tensor(&[2.0f32; 100])?;
    let (a, b) = (first.as_ptr() as usize, second.as_ptr() as usize);
    ensure!(
        a != b && a.is_multiple_of(128) && b.is_multiple_of(128),
        "{a:x} and {b:x}"
    );
    drop(first);
    let third = rank.tensor(&[3.0f32; 97])?;
    ensure!(
        third.as_ptr() as usize == a,
        "memory of a dropped tensor was not used again"
    );
    ensure!(
        rank.read::<f32>(&second)? == [2.0; 100],
        "a live tensor was overwritten"
    );
    // More than is kept goes back to the driver.
    for _ in 0..12 {
        let large: Vec<Tensor> = (0..3)
            .map(|i| {
                HpuAccelerator
                    .alloc(0, DType::U32, &[(32 << 20) / 4 + i * 64])
                    .map_err(text)
            })
            .collect::<Outcome<_>>()?;
        drop(large);
    }
    Ok(())
}

fn factory(_: &Rank) -> Outcome {
    let factory = oxccl_hccl::HcclFactory;
    factory.probe().map_err(text)?;
    let library = factory.library().ok_or("no library was found")?;
    for word in ["HCCL 2.6.4", "stand-in", "libhccl.so", "libSynapse.so"] {
        ensure!(library.contains(word), "'{word}' is not in: {library}");
    }
    let capabilities = factory.capabilities();
    ensure!(
        capabilities.reduces(ReduceOp::Max, DType::BF16),
        "bf16 max is not advertised"
    );
    for (op, dtype) in [
        (ReduceOp::Avg, DType::F32),
        (ReduceOp::Product, DType::F32),
        (ReduceOp::Sum, DType::I64),
        (ReduceOp::Sum, DType::F64),
    ] {
        ensure!(!capabilities.reduces(op, dtype), "{op} of {dtype} is advertised");
    }
    for device in [Device::CPU, Device::new(DeviceKind::Hpu, 1)] {
        let Err(e) = factory.create(&device, &GroupOptions::default()) else {
            return Err(format!("a group on {device}"));
        };
        ensure!(e.kind() == ErrorKind::InvalidArgument, "{e}");
    }
    let group = factory
        .create(&Device::new(DeviceKind::Hpu, 0), &GroupOptions::default())
        .map_err(text)?;
    ensure!(group.info().world_size == 0, "a new group is configured");
    Ok(())
}

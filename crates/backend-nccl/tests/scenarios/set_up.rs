//! Libraries, drivers and devices that are missing or old, and options on every path.

use std::time::Duration;

use backend_nccl::{CudaAccelerator, NcclFactory, NcclGroup};
use ftcore::registry::BackendFactory;
use ftcore::{
    Accelerator, Collective, DType, Device, DeviceKind, ErrorKind, GroupOptions, OpKind, ProcessGroup,
    ProcessGroupExt, ReduceOp, Registry, SubmitOptions, deadline_in,
};
use libtest_mimic::Failed;

use super::kit::*;
use super::parts::message;
use super::system::nothing_is_left;

pub(super) fn no_memory() -> Outcome {
    let mut refused = None;
    for _ in 0..20 {
        match CudaAccelerator.alloc(0, DType::F32, &[10]) {
            Ok(_) => {}
            Err(e) => refused = Some(e),
        }
    }
    says(
        &refused.ok_or("no allocation failed")?,
        ErrorKind::Backend,
        &["cuMemAllocAsync", "out of memory", "code 2"],
    )
}

pub(super) fn no_kernels() -> Outcome {
    let e = group(0, GroupOptions::default())
        .err()
        .ok_or("a group was made")?;
    says(&e, ErrorKind::Backend, &["cuModuleLoadData", "code 218"])
}

pub(super) fn no_device() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(&e, ErrorKind::Unsupported, &["cuInit", "no CUDA-capable device"])?;
    check(CudaAccelerator.count() == 0, || {
        "devices are counted without a driver".into()
    })
}

pub(super) fn no_driver() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(
        &e,
        ErrorKind::Unsupported,
        &["CUDA driver was not found", "/nowhere/libcuda.so.1"],
    )?;
    let e = group(0, GroupOptions::default())
        .err()
        .ok_or("a group was made")?;
    says(&e, ErrorKind::Unsupported, &["/nowhere/libcuda.so.1"])
}

pub(super) fn no_library() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(
        &e,
        ErrorKind::Unsupported,
        &["/nowhere/libnccl.so.2", "OXCCL_NCCL_PATH"],
    )?;
    check(NcclFactory.library().is_none(), || {
        "a library that is not there is described".into()
    })
}

pub(super) fn too_old() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(&e, ErrorKind::Unsupported, &["2.26.2", "2.27.0"])
}

pub(super) fn missing_function() -> Outcome {
    let e = NcclFactory.probe().err().ok_or("the probe passed")?;
    says(&e, ErrorKind::Unsupported, &["ncclReduceScatter", "2.27"])
}

pub(super) fn no_such_device() -> Outcome {
    let count = CudaAccelerator.count();
    let beyond = Device::new(DeviceKind::Cuda, count + 5);
    let e = NcclGroup::new("x", &beyond, &GroupOptions::default())
        .err()
        .ok_or("a group was made")?;
    let words = [beyond.to_string(), format!("sees {count} device")];
    says(&e, ErrorKind::Unsupported, &words.each_ref().map(String::as_str))?;
    let e = NcclGroup::new("x", &Device::CPU, &GroupOptions::default())
        .err()
        .ok_or("a group was made")?;
    says(&e, ErrorKind::InvalidArgument, &["cpu"])
}

fn unusual() -> GroupOptions {
    GroupOptions {
        is_high_priority_stream: Some(true),
        cga_cluster_size: Some(2),
        min_ctas: Some(3),
        max_ctas: Some(7),
        net_name: Some("Socket".into()),
        split_share: Some(true),
        blocking: Some(true),
        traffic_class: Some(105),
        ..Default::default()
    }
}

pub(super) fn log_lines() -> Result<Vec<String>, Failed> {
    let path = std::env::var("OXCCL_STANDIN_NCCL_LOG")?;
    Ok(std::fs::read_to_string(path)?
        .lines()
        .map(str::to_string)
        .collect())
}

fn is_configuration(line: &str) -> bool {
    line.starts_with("init ") || line.starts_with("split ")
}

const ALL: [&str; 7] = [
    "blocking=1",
    "cga=2",
    "min_ctas=3",
    "max_ctas=7",
    "net=Socket",
    "split_share=1",
    "traffic_class=105",
];

pub(super) fn options_arrive() -> Outcome {
    arrive(unusual())
}

/// [`unusual`] as variables.
pub(super) const VARIABLES: [(&str, &str); 9] = [
    ("OXCCL_STANDIN_NCCL_LOG", "@log"),
    ("OXCCL_NCCL_IS_HIGH_PRIORITY_STREAM", "true"),
    ("OXCCL_NCCL_CGA_CLUSTER_SIZE", "2"),
    ("OXCCL_NCCL_MIN_CTAS", "3"),
    ("OXCCL_NCCL_MAX_CTAS", "7"),
    ("OXCCL_NCCL_NET_NAME", "Socket"),
    ("OXCCL_NCCL_SPLIT_SHARE", "1"),
    ("OXCCL_NCCL_BLOCKING", "1"),
    ("OXCCL_NCCL_TRAFFIC_CLASS", "105"),
];

pub(super) fn variables_arrive() -> Outcome {
    arrive(GroupOptions::default())
}

/// What a program says, as hints too, comes before the variables.
pub(super) fn hints_arrive() -> Outcome {
    let mut options = GroupOptions::default();
    for (name, text) in [
        ("isHighPriorityStream", "1"),
        ("cga_cluster_size", "2"),
        ("minCTAs", "3"),
        ("maxCTAs", "7"),
        ("netName", "Socket"),
        ("splitShare", "true"),
        ("blocking", "1"),
        ("trafficClass", "105"),
    ] {
        options.hints.insert(name.into(), text.into());
    }
    arrive(options)
}

fn arrive(options: GroupOptions) -> Outcome {
    two(options, |rank, group, store| {
        sum_works(rank, group)?;
        next_epoch(rank, group, store)?;
        let child = group
            .split(Some(7), rank, deadline_in(Duration::from_secs(20)))?
            .ok_or("no child")?;
        let tensor = filled(rank, 1.0, 10)?;
        let sum = read(&child.all_reduce(tensor, ReduceOp::Sum)?.take_tensor()?)?;
        check(sum == [2.0; 10], || format!("the child sums {sum:?}"))?;
        // The child makes its own communicators with the same options: a channel.
        let peer = 1 - rank;
        let work = if rank == 0 {
            child.send(filled(rank, 5.0, 3)?, peer, 0)?
        } else {
            child.recv(filled(rank, 0.0, 3)?, peer, 0)?
        };
        work.wait_done()?;
        Ok(())
    })?;
    let lines = log_lines()?;
    let configurations: Vec<&String> = lines.iter().filter(|l| is_configuration(l)).collect();
    let count = |prefix: &str| configurations.iter().filter(|l| l.starts_with(prefix)).count();
    // Two epochs and a channel of two ranks each, and the split.
    check((count("init"), count("split")) == (6, 2), || {
        format!("{configurations:#?}")
    })?;
    all_arrived(&configurations)?;
    // Two epochs and a child per rank, and the channels.
    let high = lines.iter().filter(|l| *l == "stream priority=-5").count();
    check(high >= 8, || format!("{high} streams with high priority"))
}

/// The library keeps the address of a communicator's name, which must be there until the communicator is not: a group's, a child's and a
/// channel's.
pub(super) fn names_stay() -> Outcome {
    two(GroupOptions::default(), |rank, group, _| {
        let child = group
            .split(Some(0), rank, deadline_in(TIME_LIMIT))?
            .ok_or("no child")?;
        Ok(message(rank, &*child, TIME_LIMIT)?.wait_done()?)
    })?;
    nothing_is_left()?;
    let lines = log_lines()?;
    let names = |wanted: fn(&str) -> bool| {
        let lines = lines.iter().filter(|l| wanted(l));
        let mut names: Vec<&str> = lines.filter_map(|l| l.split("name=").nth(1)).collect();
        names.sort_unstable();
        names
    };
    let (given, told) = (names(is_configuration), names(|l| l.starts_with("told ")));
    check(given.len() == 6 && given == told, || {
        format!("{given:?} were given, {told:?} read at the end")
    })
}

/// Isolated groups whose options are variables: the children's libraries are told, again after an abort.
pub(super) fn isolated_variables_arrive() -> Outcome {
    groups(2, super::isolated::isolated, |rank, group, store| {
        group.abort("again");
        group.configure(configuration(store, rank, 2, 2, Duration::from_secs(20)))?;
        group.barrier()?;
        Ok(())
    })?;
    let lines = log_lines()?;
    let configurations: Vec<&String> = lines.iter().filter(|l| is_configuration(l)).collect();
    check(configurations.len() >= 4, || format!("{configurations:#?}"))?;
    all_arrived(&configurations)
}

fn all_arrived(configurations: &[&String]) -> Outcome {
    for line in configurations {
        for word in ALL {
            check(line.split(' ').any(|w| w == word), || {
                format!("'{word}' did not arrive: {line}")
            })?;
        }
    }
    Ok(())
}

/// A group of the registry says what was dropped, and so do those split from it.
pub(super) fn drops_are_reported() -> Outcome {
    let mut options = GroupOptions {
        lenient: true,
        ..GroupOptions::default()
    };
    options.hints.insert("nonsense".into(), "1".into());
    let registry = Registry::global();
    let group = registry.create("nccl", &cuda(0), &options)?;
    group.configure(by_itself(1, Duration::from_secs(20)))?;
    let child = group
        .split(Some(0), 0, deadline_in(Duration::from_secs(20)))?
        .ok_or("no child")?;
    for info in [group.info(), child.info()] {
        check(
            info.dropped_options == ["hint:nonsense", "OXCCL_NCCL_NO_SUCH"],
            || format!("{info:?}"),
        )?;
    }
    options.lenient = false;
    let e = registry
        .create("nccl", &cuda(0), &options)
        .err()
        .ok_or("a group was made")?;
    says(
        &e,
        ErrorKind::InvalidArgument,
        &["hint:nonsense", "OXCCL_NCCL_NO_SUCH", "min_ctas"],
    )
}

pub(super) fn without_counting() -> Outcome {
    let mut options = GroupOptions::default();
    options.hints.insert("contributors".into(), "all".into());
    two(options, |rank, group, _| {
        check(!group.capabilities().has(ftcore::Feature::Contributors), || {
            "counting is advertised".into()
        })?;
        let work = group.all_reduce(filled(rank, 1.0 + rank as f32, 100)?, ReduceOp::Avg)?;
        let mean = read(&work.take_tensor()?)?;
        check(mean == [1.5; 100], || format!("the mean is {:?}", mean.first()))?;
        check(work.contributors() == 2, || "all contribute".into())?;
        let op = Collective::AllReduce {
            tensors: vec![filled(rank, 1.0, 1)?],
            op: ReduceOp::Sum,
        };
        let options = SubmitOptions {
            contribute: false,
            ..SubmitOptions::default()
        };
        let rejected = group.run(op, options).err().ok_or("abstaining was accepted")?;
        says(&rejected.error, ErrorKind::Unsupported, &["contributors"])
    })
}

pub(super) fn fp8(wanted: bool) -> Outcome {
    let group = group(0, GroupOptions::default())?;
    let reduced = group.capabilities().reduces(ReduceOp::Sum, DType::F8E4M3);
    check(reduced == wanted, || {
        format!("that 8-bit floats are reduced is {reduced}")
    })?;
    check(group.capabilities().moves.contains(DType::F8E4M3), || {
        "8-bit floats are not moved".into()
    })?;
    let native = CudaAccelerator.native_fp8(0);
    check(native == wanted, || {
        format!("that it computes in FP8 is {native}")
    })
}

pub(super) fn says_what_it_is() -> Outcome {
    let text = NcclFactory.library().ok_or("no description")?;
    check(text.contains("stand-in"), || text.clone())?;
    let name = CudaAccelerator.name(0)?;
    check(name.contains("stand-in"), || name.clone())
}

pub(super) fn old_functions() -> Outcome {
    two(GroupOptions::default(), |rank, group, store| {
        check(group.capabilities().ops.contains(OpKind::AllToAllInto), || {
            "all-to-all is gone".into()
        })?;
        let input = filled(rank, 1.0 + rank as f32, 6)?;
        let output = CudaAccelerator.alloc(on(rank), DType::F32, &[6])?;
        let result = read(
            &group
                .all_to_all_into(input, output, Vec::new(), Vec::new())?
                .take_tensor()?,
        )?;
        check(result == [1.0, 1.0, 1.0, 2.0, 2.0, 2.0], || format!("{result:?}"))?;
        // An abort would end the other rank's operation too.
        store.barrier("both have it", 2, deadline_in(Duration::from_secs(20)))?;
        // Without a revoke an abort goes the old way.
        if rank == 0 {
            group.abort("enough");
        }
        let e = group_error(group)?;
        says(&e, ErrorKind::Aborted, &["enough"])
    })
}

//! What a group by device makes of its members, with members that write down what they are told; and what a world asks backends for.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a failure here is a failed test"
)]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ftcore::{
    Capabilities, Checked, Collective, Completion, Configuration, DType, DTypeSet, Device, DeviceKind, Epoch,
    Error, ErrorKind, Feature, FeatureSet, GroupInfo, GroupOptions, InMemoryStore, OpKind, OpSet,
    ProcessGroup, ProcessGroupExt, ReduceOp, Rejected, Result, SubmitOptions, Tensor, Traffic, Work,
    deadline_in,
};
use oxccl_world::{BackendSpec, ByDevice, WorldOptions};

/// What a member was told, and what it answers.
#[derive(Default)]
struct Told {
    prefixes: Vec<String>,
    ops: Vec<OpKind>,
    aborts: Vec<String>,
    shutdowns: u32,
    error: Option<Error>,
    refuses_configure: bool,
    /// It comes to connecting only after this, and then waits for a peer that never comes.
    before_waiting: Option<Box<dyn FnOnce() + Send>>,
}

/// A member that does nothing but answer.
struct Member {
    device: Device,
    capabilities: Capabilities,
    traffic: Traffic,
    told: Arc<Mutex<Told>>,
}

impl ProcessGroup for Member {
    fn info(&self) -> GroupInfo {
        GroupInfo {
            backend: "fake".into(),
            name: "member".into(),
            rank: 0,
            world_size: 1,
            epoch: Epoch(1),
            device: self.device.clone(),
            dropped_options: Vec::new(),
        }
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn configure(&self, configuration: Configuration) -> Result<()> {
        let mut told = self.told.lock().unwrap();
        told.prefixes.push(configuration.prefix);
        if told.refuses_configure {
            return Err(Error::new(ErrorKind::PeerLost, "no rank came"));
        }
        told.error = None;
        let Some(before) = told.before_waiting.take() else {
            return Ok(());
        };
        drop(told);
        before();
        while Instant::now() < configuration.deadline {
            configuration.cancel.check()?;
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Error::timeout("a peer did not come"))
    }
    fn submit(&self, op: Checked, _: SubmitOptions) -> Result<Work, Box<Rejected>> {
        let op = op.into_inner();
        self.told.lock().unwrap().ops.push(op.kind());
        let (kind, tensors) = (op.kind(), op.into_tensors());
        let (source, contributors) = (None, 1);
        let done = Completion {
            tensors,
            source,
            contributors,
        };
        Ok(Work::finished(kind, done))
    }
    fn split(&self, _: Option<u32>, _: u32, _: Instant) -> Result<Option<Box<dyn ProcessGroup>>> {
        Ok(None)
    }
    fn abort(&self, reason: &str) {
        self.told.lock().unwrap().aborts.push(reason.to_string());
    }
    fn error(&self) -> Option<Error> {
        self.told.lock().unwrap().error.clone()
    }
    fn shutdown(&self, _: Instant) -> Result<()> {
        self.told.lock().unwrap().shutdowns += 1;
        Ok(())
    }
    fn traffic(&self) -> Traffic {
        self.traffic
    }
}

fn hpu() -> Device {
    Device::new(DeviceKind::Hpu, 0)
}

/// What a member offers: all operations on its device, with these features and options.
fn offers(device: &Device, features: &[Feature], options: &[&'static str], moves: &[DType]) -> Capabilities {
    let sums = DTypeSet::of(moves);
    Capabilities {
        ops: OpSet::of(&OpKind::ALL),
        moves: sums,
        reduces: [sums; ReduceOp::COUNT],
        features: FeatureSet::of(features),
        options: options.iter().map(|&o| o.into()).collect(),
        devices: vec![device.kind.name().to_string().into()],
        notes: Vec::new(),
    }
}

/// `cpu` and `hpu` in one group, with the CPU as its own device if `home_is_cpu`; and what both are told.
fn both(home_is_cpu: bool) -> (ByDevice, [Arc<Mutex<Told>>; 2]) {
    let told: [Arc<Mutex<Told>>; 2] = std::array::from_fn(|_| Arc::default());
    let member = |device: Device, features: &[Feature], options, moves, sent, told: &Arc<Mutex<Told>>| {
        let capabilities = offers(&device, features, options, moves);
        let group: Box<dyn ProcessGroup> = Box::new(Member {
            device: device.clone(),
            capabilities,
            traffic: Traffic {
                sent,
                received: 2 * sent,
            },
            told: told.clone(),
        });
        (device, group)
    };
    let common = [Feature::Abort, Feature::Contributors];
    let members = vec![
        member(
            Device::CPU,
            &common,
            &["timeout", "interface"],
            &[DType::F32, DType::I16],
            3,
            &told[0],
        ),
        member(
            hpu(),
            &common[..1],
            &["timeout", "streams"],
            &[DType::F32, DType::BF16],
            40,
            &told[1],
        ),
    ];
    let home = if home_is_cpu { Device::CPU } else { hpu() };
    (ByDevice::new("g", home, members).unwrap(), told)
}

fn configuration(epoch: u64) -> Configuration {
    Configuration {
        store: Arc::new(InMemoryStore::new()),
        prefix: "p".to_string(),
        name: "g".to_string(),
        epoch: Epoch(epoch),
        rank: 0,
        world_size: 1,
        deadline: deadline_in(Duration::from_secs(5)),
        cancel: Default::default(),
    }
}

#[test]
fn members_are_configured_under_prefixes_of_their_own_and_a_barrier_is_the_home_devices() {
    for home_is_cpu in [true, false] {
        let (group, told) = both(home_is_cpu);
        group.configure(configuration(1)).unwrap();
        let prefixes = told.each_ref().map(|t| t.lock().unwrap().prefixes.clone());
        assert_eq!(prefixes[0].len(), 1);
        assert_ne!(prefixes[0], prefixes[1]);
        assert!(
            prefixes.iter().flatten().all(|p| p.starts_with("p/")),
            "{prefixes:?}"
        );
        group.barrier().unwrap();
        let barriers = told.each_ref().map(|t| t.lock().unwrap().ops.len());
        assert_eq!(barriers, if home_is_cpu { [1, 0] } else { [0, 1] });
        group.shutdown(deadline_in(Duration::from_secs(5))).unwrap();
        assert!(told.iter().all(|t| t.lock().unwrap().shutdowns == 1));
        assert_eq!(
            group.traffic(),
            Traffic {
                sent: 43,
                received: 86
            }
        );
    }
}

#[test]
fn inv9_features_and_options_are_those_of_all_members_types_those_of_any() {
    let (group, _) = both(true);
    let c = group.capabilities();
    assert!(c.has(Feature::Abort) && !c.has(Feature::Contributors));
    assert_eq!(c.options, ["timeout"]);
    for dtype in [DType::F32, DType::I16, DType::BF16] {
        assert!(
            c.moves.contains(dtype) && c.reduces(ReduceOp::Sum, dtype),
            "{dtype}"
        );
    }
    assert!(!c.moves.contains(DType::F64));
    assert_eq!(c.devices, ["cpu", "hpu"]);
    assert!(
        !group
            .capabilities_on(&DeviceKind::Hpu)
            .unwrap()
            .has(Feature::Contributors)
    );
    assert!(group.capabilities_on(&DeviceKind::Cuda).is_none());
}

#[test]
fn a_failure_of_one_member_is_the_groups_until_the_next_configuration() {
    let (group, told) = both(true);
    group.configure(configuration(1)).unwrap();
    let all_reduce = || {
        let tensors = vec![Tensor::from_vec(vec![1f32])];
        let op = ReduceOp::Sum;
        group.run(Collective::AllReduce { tensors, op }, SubmitOptions::default())
    };
    all_reduce().unwrap();
    // The other member fails; this one would go on.
    told[1].lock().unwrap().error = Some(Error::new(ErrorKind::PeerLost, "the first failure"));
    let rejected = all_reduce().err().unwrap();
    assert_eq!(rejected.error.kind(), ErrorKind::Poisoned);
    assert!(
        rejected.error.to_string().contains("the first failure"),
        "{}",
        rejected.error
    );
    // What comes later is not what it was.
    told[0].lock().unwrap().error = Some(Error::new(ErrorKind::Aborted, "a consequence"));
    let seen = group.error().unwrap();
    assert!(seen.to_string().contains("the first failure"), "{seen}");
    assert_eq!(told[0].lock().unwrap().ops.len(), 1);
    group.configure(configuration(2)).unwrap();
    assert!(group.error().is_none());
    all_reduce().unwrap();
}

#[test]
fn an_abort_and_a_failed_configuration_reach_every_member() {
    let (group, told) = both(true);
    group.configure(configuration(1)).unwrap();
    group.abort("enough");
    for told in &told {
        assert!(told.lock().unwrap().aborts.iter().any(|r| r == "enough"));
    }
    let (group, told) = both(true);
    told[1].lock().unwrap().refuses_configure = true;
    let e = group.configure(configuration(1)).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::PeerLost);
    let why = told[0].lock().unwrap().aborts.join(" ");
    assert!(why.contains("hpu") && why.contains("no rank came"), "{why}");
}

/// How ranks of two configure, with much time.
fn of_two() -> Configuration {
    Configuration {
        world_size: 2,
        deadline: deadline_in(Duration::from_secs(30)),
        ..configuration(1)
    }
}

#[test]
fn l27_an_abort_between_the_members_ends_a_configuration_that_waits_for_a_peer() {
    for member in [0, 1] {
        let (group, told) = both(true);
        let group = Arc::new(group);
        let aborting = group.clone();
        told[member].lock().unwrap().before_waiting = Some(Box::new(move || aborting.abort("enough")));
        let began = Instant::now();
        let e = group.configure(of_two()).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Aborted, "member {member}: {e}");
        assert!(began.elapsed() < Duration::from_secs(15), "member {member}");
        assert_eq!(group.info().world_size, 0);
    }
}

#[test]
fn l27_a_peer_that_is_lost_to_one_member_is_not_waited_for_by_the_next() {
    let (group, told) = both(true);
    let first = told[0].clone();
    told[1].lock().unwrap().before_waiting = Some(Box::new(move || {
        let lost = Error::new(ErrorKind::PeerLost, "closed its connection").with_peer(1);
        first.lock().unwrap().error = Some(lost);
    }));
    let began = Instant::now();
    let e = group.configure(of_two()).unwrap_err();
    assert_eq!(
        (e.kind(), e.context().peer),
        (ErrorKind::PeerLost, Some(1)),
        "{e}"
    );
    assert!(began.elapsed() < Duration::from_secs(15));
    let why = told[1].lock().unwrap().aborts.join(" ");
    assert!(why.contains("closed its connection"), "{why}");
}

#[test]
fn a_device_has_one_member_and_the_home_device_has_one() {
    let member = |device: Device| -> (Device, Box<dyn ProcessGroup>) {
        let capabilities = offers(&device, &[], &[], &[DType::F32]);
        let group = Member {
            device: device.clone(),
            capabilities,
            traffic: Traffic::default(),
            told: Arc::default(),
        };
        (device, Box::new(group))
    };
    let twice = ByDevice::new("g", Device::CPU, vec![member(Device::CPU), member(Device::CPU)]);
    let e = twice.err().unwrap().to_string();
    assert!(e.contains("two members serve cpu"), "{e}");
    let without = ByDevice::new("g", hpu(), vec![member(Device::CPU)]);
    let e = without.err().unwrap().to_string();
    assert!(e.contains("no member serves hpu"), "{e}");
}

#[test]
fn each_backend_is_asked_for_with_the_options_of_its_device_kind() {
    let asked: Arc<Mutex<Vec<(String, Device, Duration)>>> = Arc::default();
    let log = asked.clone();
    let with = |seconds| GroupOptions {
        timeout: Duration::from_secs(seconds),
        ..GroupOptions::default()
    };
    let wanted = WorldOptions {
        backends: "cpu:one,hpu:two".parse::<BackendSpec>().unwrap(),
        device: Device::new(DeviceKind::Hpu, 3),
        options: with(7),
        options_of: [(DeviceKind::Hpu, with(9))].into(),
        make: Arc::new(move |name, device, options| {
            log.lock()
                .unwrap()
                .push((name.to_string(), device.clone(), options.timeout));
            Ok(Box::new(Member {
                device: device.clone(),
                capabilities: offers(device, &[], &[], &[DType::F32]),
                traffic: Traffic::default(),
                told: Arc::default(),
            }))
        }),
        ..WorldOptions::default()
    };
    wanted.group("g").unwrap();
    let seconds = Duration::from_secs;
    let expected = [
        ("one".to_string(), Device::CPU, seconds(7)),
        ("two".to_string(), Device::new(DeviceKind::Hpu, 3), seconds(9)),
    ];
    assert_eq!(*asked.lock().unwrap(), expected);
}

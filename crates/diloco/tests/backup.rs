//! Backup copies on a device and on the host: the same bits whatever happens, and what the device needs for them.
//!
//! The device is a stand-in, host memory that its accelerator alone touches and counts ([`CountedDevice`]).

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;

use crate::scripted::{layer, params};
use ftcore::{Device, DeviceKind, ErrorKind, Result, Step};
use oxccl_diloco::{
    Backup, Diloco, DilocoConfig, OuterOptimizer, Parameters, SliceParameters, TensorParameters,
};
use replica::StateDict;
use training_rig::{CountedDevice, Nothing, ScriptedReplica, Source};

/// Elements per layer; the largest one is not in the first fragment.
const SIZES: [usize; 5] = [30, 50, 7, 20, 1];
const BYTES: usize = 4 * (30 + 50 + 7 + 20 + 1);

type OnDevice = Diloco<ScriptedReplica, TensorParameters>;

fn nesterov() -> OuterOptimizer {
    OuterOptimizer::Nesterov {
        lr: 0.7,
        momentum: 0.9,
    }
}

/// One of each kind: overlapped and mixed, blocking, eager.
fn configs() -> [DilocoConfig; 3] {
    let streaming = DilocoConfig {
        sync_every: 6,
        fragments: 3,
        delay: 1,
        mixing: 0.5,
        outer: nesterov(),
        bucket_elements: 16,
        ..DilocoConfig::default()
    };
    let blocking = DilocoConfig {
        fragments: 1,
        delay: 0,
        mixing: 0.0,
        sync_every: 2,
        ..streaming.clone()
    };
    let eager = DilocoConfig {
        eager: true,
        fragments: 2,
        sync_every: 4,
        ..blocking.clone()
    };
    [streaming, blocking, eager]
}

fn kept(backup: Backup, config: &DilocoConfig) -> DilocoConfig {
    DilocoConfig {
        backup,
        ..config.clone()
    }
}

/// Among replicas of which the mean moves with the step.
fn replica() -> ScriptedReplica {
    let mut replica = ScriptedReplica::by_step(|step, own| {
        let other = |(i, x): (usize, &f32)| 0.5 * x + (step as f32 + i as f32 * 0.37).sin() * 0.01;
        own.iter().enumerate().map(other).collect()
    });
    replica.snapshots = false;
    replica
}

/// Zeros on the device.
fn on(device: &CountedDevice) -> TensorParameters {
    let tensors = SIZES
        .iter()
        .zip(0..)
        .map(|(n, i)| (format!("p{i}"), device.tensor(&vec![0.0; *n])));
    TensorParameters::new(tensors.collect(), None).unwrap()
}

fn inner_step(params: &mut dyn Parameters, at: usize) {
    for i in 0..params.len() {
        let moved = |(k, w): (usize, &mut f32)| *w -= ((at * (k + 1) + i) as f32).sin() * 0.1 + 0.02;
        let step = |w: &mut [f32]| w.iter_mut().enumerate().for_each(moved);
        params.write(i, &mut |w| step(w)).unwrap();
    }
}

/// Inner steps number `steps`; how many attempts at rounds failed meanwhile.
fn train<P: Parameters>(d: &mut Diloco<ScriptedReplica, P>, steps: std::ops::Range<usize>) -> Result<u32> {
    let mut failed = 0;
    for at in steps {
        inner_step(d.params_mut(), at);
        let reports = d.after_inner_step(&mut Nothing)?;
        failed += reports.iter().map(|r| r.failed_attempts).sum::<u32>();
    }
    Ok(failed)
}

/// A run that has begun, prepared by `prepare`.
fn begun<P: Parameters>(
    params: P,
    config: DilocoConfig,
    prepare: impl FnOnce(&mut ScriptedReplica),
) -> Diloco<ScriptedReplica, P> {
    let mut replica = replica();
    prepare(&mut replica);
    let mut d = Diloco::with_layers(replica, params, config, &layer).unwrap();
    d.begin(&mut Nothing).unwrap();
    d
}

/// Global and local parameters by bits, and the hash of the global ones.
type End = (Vec<Vec<u32>>, Vec<Vec<u32>>, String);

fn end<P: Parameters>(d: &mut Diloco<ScriptedReplica, P>) -> End {
    let bits = |params: &P| -> Vec<Vec<u32>> {
        let mut all = Vec::new();
        for i in 0..params.len() {
            let one = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect();
            params.read(i, &mut |v| all.push(one(v))).unwrap();
        }
        all
    };
    let local = bits(d.params());
    let global = d.with_global(bits).unwrap();
    assert_eq!(bits(d.params()), local, "the local parameters were not put back");
    (global, local, d.global_hash().unwrap())
}

/// 13 inner steps over plain vectors, undisturbed.
fn expected(config: &DilocoConfig) -> End {
    let mut d = begun(params(&SIZES), config.clone(), |_| {});
    assert_eq!(train(&mut d, 0..13).unwrap(), 0);
    let end = end(&mut d);
    assert!(end.0 != end.1 && end.0.iter().flatten().any(|bits| *bits != 0));
    end
}

#[test]
fn copies_on_the_device_and_on_the_host_give_the_same_bits() {
    for config in configs() {
        let expected = expected(&config);
        for backup in [Backup::Host, Backup::Device] {
            let device = CountedDevice::new();
            let mut d = begun(on(&device), kept(backup, &config), |_| {});
            let there = match backup {
                Backup::Host => Device::CPU,
                Backup::Device => device.device(),
            };
            assert_eq!(*d.backup_device(), there);
            train(&mut d, 0..13).unwrap();
            assert!(end(&mut d) == expected, "{backup}: {config:?}");
        }
    }
}

#[test]
fn l13_failed_commits_and_lost_reductions_change_no_bit_wherever_the_copies_lie() {
    for config in configs() {
        let expected = expected(&config);
        for backup in [Backup::Host, Backup::Device] {
            let device = CountedDevice::new();
            let mut d = begun(on(&device), kept(backup, &config), |replica| {
                replica.votes = VecDeque::from([true, false, true, false, false, true, false]);
                replica.reductions = VecDeque::from([true, true, true, true, false, true, true, true, false]);
            });
            assert!(train(&mut d, 0..13).unwrap() >= 4);
            assert!(end(&mut d) == expected, "{backup}: {config:?}");
        }
    }
}

/// What a peer gets that heals from `d`, with its step.
fn state<P: Parameters>(d: &mut Diloco<ScriptedReplica, P>) -> (i64, StateDict) {
    (d.step().0, d.save(&mut Nothing).unwrap())
}

/// A replica that heals from `source` into a run on the device.
fn healed(device: &CountedDevice, config: DilocoConfig, (step, state): (i64, StateDict)) -> OnDevice {
    begun(on(device), config, |replica| {
        replica.heal = Some(Source::Now(step, state))
    })
}

#[test]
fn a_replica_heals_and_a_stopped_run_goes_on_from_either_place_into_either() {
    for config in configs() {
        let expected = expected(&config);
        // Between two rounds, so that the healed one has nothing in flight that it did not contribute to.
        let stop = usize::try_from(config.round_steps()).unwrap() * 2;
        for (from, into) in [
            (Backup::Host, Backup::Device),
            (Backup::Device, Backup::Host),
            (Backup::Device, Backup::Device),
        ] {
            let device = CountedDevice::new();
            let mut source = begun(on(&device), kept(from, &config), |_| {});
            train(&mut source, 0..stop).unwrap();
            let (step, saved) = state(&mut source);

            let mut replica = replica();
            replica.step = step;
            let mut other = Diloco::with_layers(replica, on(&device), kept(into, &config), &layer).unwrap();
            other.restore(&saved, &mut Nothing).unwrap();
            other.begin(&mut Nothing).unwrap();
            train(&mut other, stop..13).unwrap();
            assert!(end(&mut other) == expected, "{from} into {into}: {config:?}");

            let mut healed = healed(&device, kept(into, &config), (step, saved));
            let (there, here) = (end(&mut source), end(&mut healed));
            assert_eq!((&here.0, &here.2), (&there.0, &there.2));
            // With eager updates its part of the round in flight is not the source's: it does not contribute. Of several fragments it holds none of
            // the source's inner steps.
            assert!(
                config.eager || config.fragments > 1 || here.1 == there.1,
                "{from} into {into}: {config:?}"
            );
        }
    }
}

#[test]
fn on_the_host_copies_take_nothing_of_the_device_and_there_one_copy_of_the_parameters() {
    for config in configs() {
        for backup in [Backup::Host, Backup::Device] {
            let device = CountedDevice::new();
            let parameters = on(&device);
            assert_eq!(device.in_use(), BYTES);
            device.take_peak();
            let mut d = begun(parameters, kept(backup, &config), |replica| {
                replica.snapshots = true;
                replica.votes = VecDeque::from([true, true, false, false]);
            });
            let mut seen = vec![device.take_peak()];
            for at in 0..13 {
                train(&mut d, at..at + 1).unwrap();
                seen.push(device.take_peak());
            }
            let (step, saved) = state(&mut d);
            end(&mut d);
            d.global_hash().unwrap();
            seen.push(device.take_peak());
            // What it heals from comes into the memory that it has.
            let before = device.in_use();
            let mut replica = replica();
            replica.heal = Some(Source::Now(step, saved));
            let other = CountedDevice::new();
            let mut healed = Diloco::with_layers(replica, on(&other), kept(backup, &config), &layer).unwrap();
            other.take_peak();
            healed.begin(&mut Nothing).unwrap();
            seen.push(other.take_peak());
            assert_eq!(device.in_use(), before);
            let copies = match (backup, config.eager) {
                (Backup::Host, _) => 0,
                (Backup::Device, false) => 1,
                (Backup::Device, true) => 2,
            };
            assert!(
                seen.iter().all(|peak| *peak == BYTES * (1 + copies)),
                "{backup}, {config:?}: {seen:?} for parameters of {BYTES} bytes"
            );
            drop(d);
            assert_eq!(device.in_use(), 0, "memory is given back");
        }
    }
}

#[test]
fn a_round_moves_its_fragment_only_and_each_copy_three_times() {
    // Sent and applied: the parameters out, then out and in; the copy out, then out and in.
    let config = DilocoConfig {
        delay: 0,
        ..configs()[0].clone()
    };
    for (backup, times) in [(Backup::Host, 3), (Backup::Device, 6)] {
        let device = CountedDevice::new();
        let mut d = begun(on(&device), kept(backup, &config), |_| {});
        for (at, fragment) in [[0usize, 3].as_slice(), &[1, 4], &[2]].into_iter().enumerate() {
            let bytes: usize = fragment.iter().map(|l| 4 * SIZES[*l]).sum();
            inner_step(d.params_mut(), 2 * at);
            d.after_inner_step(&mut Nothing).unwrap();
            inner_step(d.params_mut(), 2 * at + 1);
            device.take_copied();
            assert_eq!(d.after_inner_step(&mut Nothing).unwrap().len(), 1);
            assert_eq!(device.take_copied(), times * bytes, "{backup}, fragment {at}");
        }
    }
}

#[test]
fn a_device_without_room_for_copies_is_refused_at_the_start_with_what_to_change() {
    for (config, spare) in configs().iter().zip([BYTES - 1, BYTES - 4, 2 * BYTES - 1]) {
        let device = CountedDevice::with_capacity(BYTES + spare);
        let refused = Diloco::with_layers(replica(), on(&device), kept(Backup::Device, config), &layer);
        let e = refused.err().unwrap();
        assert_eq!((e.kind(), device.in_use()), (ErrorKind::Backend, 0));
        let text = e.to_string();
        for part in [
            "432 bytes",
            &device.device().to_string(),
            "no memory",
            "Backup::Host",
        ] {
            assert!(text.contains(part), "{text}");
        }
        // There they fit.
        Diloco::with_layers(replica(), on(&device), kept(Backup::Host, config), &layer).unwrap();
    }
}

/// Parameters that say they are on a device which this program knows nothing of.
struct Elsewhere(SliceParameters);

impl Parameters for Elsewhere {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn name(&self, i: usize) -> &str {
        self.0.name(i)
    }
    fn count(&self, i: usize) -> usize {
        self.0.count(i)
    }
    fn read(&self, i: usize, f: &mut dyn FnMut(&[f32])) -> Result<()> {
        self.0.read(i, f)
    }
    fn write(&mut self, i: usize, f: &mut dyn FnMut(&mut [f32])) -> Result<()> {
        self.0.write(i, f)
    }
    fn device(&self) -> Device {
        Device::new(DeviceKind::Named("unheard-of".into()), 2)
    }
}

#[test]
fn a_device_of_an_unknown_kind_is_refused_and_host_parameters_keep_their_copies_on_the_host() {
    let config = DilocoConfig::diloco(2);
    let make = |backup| {
        let params = Elsewhere(params(&SIZES));
        Diloco::with_layers(replica(), params, kept(backup, &config), &layer).map(drop)
    };
    make(Backup::Host).unwrap();
    let e = make(Backup::Device).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::Unsupported);
    for part in ["unheard-of:2", "known: cpu", "Backup::Host"] {
        assert!(e.to_string().contains(part), "{e}");
    }
    let d = begun(params(&SIZES), kept(Backup::Device, &config), |_| {});
    assert_eq!(*d.backup_device(), Device::CPU);
}

#[test]
fn a_device_that_fails_ends_the_run_with_its_error_and_never_with_other_bits() {
    for config in configs() {
        let expected = expected(&config);
        // The 12th inner step ends a round in every setting; the 13th sends one, where that is not the same.
        for last in [11, 12] {
            let mut failures = 0;
            loop {
                let device = CountedDevice::new();
                let mut d = begun(on(&device), kept(Backup::Device, &config), |_| {});
                train(&mut d, 0..last).unwrap();
                inner_step(d.params_mut(), last);
                // Only copies in this call fail.
                device.fail_after(failures);
                let outcome = d.after_inner_step(&mut Nothing);
                device.fail_after(usize::MAX);
                match outcome {
                    Err(e) => assert_eq!((e.kind(), e.code()), (ErrorKind::Backend, Some(700)), "{e}"),
                    Ok(_) => {
                        train(&mut d, last + 1..13).unwrap();
                        assert!(end(&mut d) == expected, "{config:?}");
                        break;
                    }
                }
                failures += 1;
            }
            assert!(failures > 3 || last == 12, "{config:?}: {failures}");
        }
    }
}

#[test]
fn inv5_a_state_that_was_taken_over_in_part_is_nobodys_to_go_on_from() {
    for config in configs() {
        let mut source = begun(params(&SIZES), config.clone(), |_| {});
        train(&mut source, 0..8).unwrap();
        let (step, saved) = state(&mut source);
        let mut torn = 0;
        for copies in 0.. {
            let device = CountedDevice::new();
            let sent = Rc::new(Cell::new(false));
            let seen = sent.clone();
            let mut other = ScriptedReplica::averaging(move |own| {
                seen.set(true);
                own.to_vec()
            });
            // It was there before, and is behind.
            (other.heal, other.step) = (Some(Source::Now(step, saved.clone())), 1);
            let mut d =
                Diloco::with_layers(other, on(&device), kept(Backup::Device, &config), &layer).unwrap();
            device.fail_after(copies);
            let healed = d.begin(&mut Nothing);
            device.fail_after(usize::MAX);
            let Err(e) = healed else {
                break;
            };
            if d.step() > Step(1) {
                // It had healed: what failed came later.
                continue;
            }
            torn += 1;
            // A caller that does not look at that error gets no further, and hands on nothing of it.
            let again = d.begin(&mut Nothing).err().unwrap();
            let saved = d.save(&mut Nothing).err().unwrap();
            for e in [e, again, saved] {
                assert_eq!(e.kind(), ErrorKind::InvalidState, "{e}");
                for part in ["of no step", "the device is gone", "start the replica again"] {
                    assert!(e.to_string().contains(part), "{e}");
                }
            }
            assert_eq!((d.step(), d.replica().snapshot.iter().count()), (Step(1), 0));
            assert!(!sent.get(), "an outer gradient of half a state was sent");
        }
        // Each write of a parameter or a copy can be the one.
        assert!(torn >= 2 * SIZES.len(), "{config:?}: {torn}");
    }
}

#[test]
fn inv5_a_committed_round_that_was_applied_in_part_is_nobodys_to_go_on_from() {
    let config = configs()[1].clone();
    let device = CountedDevice::new();
    let mut d = begun(on(&device), kept(Backup::Device, &config), |_| {});
    inner_step(d.params_mut(), 0);
    d.after_inner_step(&mut Nothing).unwrap();
    inner_step(d.params_mut(), 1);
    // Every copy of the sending goes well (a parameter and its copy of each layer), and of the outer step the first tensor's.
    device.fail_after(2 * SIZES.len() + 5);
    assert_eq!(d.after_inner_step(&mut Nothing).unwrap_err().code(), Some(700));
    device.fail_after(usize::MAX);
    assert_eq!(d.step(), Step(2), "it was committed");
    assert_eq!(
        d.save(&mut Nothing).err().unwrap().kind(),
        ErrorKind::InvalidState
    );
    for e in [
        d.after_inner_step(&mut Nothing).map(drop),
        d.with_global(|_| ()),
        d.global_hash().map(drop),
        d.finish(&mut Nothing),
    ] {
        let e = e.unwrap_err();
        assert!(e.kind() == ErrorKind::InvalidState && d.step() == Step(2), "{e}");
        assert!(e.to_string().contains("the device is gone"), "{e}");
    }
}

#[test]
fn inv5_a_look_at_the_global_parameters_that_fails_leaves_the_local_ones_or_a_state_of_no_step() {
    for config in configs() {
        let expected = expected(&config);
        let (mut torn, mut whole) = (0, 0);
        for copies in 0.. {
            let device = CountedDevice::new();
            let mut d = begun(on(&device), kept(Backup::Device, &config), |_| {});
            train(&mut d, 0..5).unwrap();
            device.fail_after(copies);
            let looked = d.with_global(|_| ());
            device.fail_after(usize::MAX);
            if let Err(e) = d.save(&mut Nothing) {
                assert!(looked.is_err() && e.kind() == ErrorKind::InvalidState, "{e}");
                torn += 1;
                continue;
            }
            train(&mut d, 5..13).unwrap();
            assert!(end(&mut d) == expected, "{config:?}: {copies} copies");
            if looked.is_ok() {
                break;
            }
            whole += 1;
        }
        // While the local parameters are read nothing is lost; from the first write on they cannot be put back.
        assert!(
            torn >= 2 * SIZES.len() && whole >= SIZES.len() - 1,
            "{torn} {whole}"
        );
    }
}

#[test]
fn tensors_of_another_type_or_device_are_refused_by_name() {
    let (one, two) = (CountedDevice::new(), CountedDevice::new());
    let refused = |tensors: Vec<(&str, ftcore::Tensor)>, says: &str| {
        let named = tensors.into_iter().map(|(n, t)| (n.to_string(), t)).collect();
        let e = TensorParameters::new(named, None).err().unwrap();
        assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        assert!(e.to_string().contains(says), "{e}");
    };
    refused(
        vec![("a", one.tensor(&[1.0])), ("b", two.tensor(&[1.0]))],
        "parameter 'b' is on counted:",
    );
    refused(
        vec![("h", ftcore::Tensor::zeros(ftcore::DType::F16, 2))],
        "parameter 'h' holds f16",
    );
    let host = TensorParameters::new(
        vec![("a".into(), ftcore::Tensor::from_slice(&[1.0f32, 2.0]))],
        None,
    );
    let mut host = host.unwrap();
    host.write(0, &mut |w| w[1] = 5.0).unwrap();
    assert_eq!(host.get(0).unwrap().as_slice::<f32>().unwrap(), [1.0, 5.0]);
    assert!(host.read(1, &mut |_| ()).is_err() && host.device().is_cpu());
}

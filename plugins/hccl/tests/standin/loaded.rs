//! The plugin as what it is: a dylib that a host tries in a child process, opens and registers.

use std::path::PathBuf;

use plugin::{load, open_trusted};

use oxccl_hccl::ftcore::registry::{OnConflict, Outcome as Registered, Provenance, Registry, Unavailable};
use oxccl_hccl::ftcore::{
    Accelerator, Collective, Configuration, DType, Device, DeviceKind, ErrorKind, GroupOptions, ProcessGroup,
    ProcessGroupExt, ReduceOp, SubmitOptions, accelerator,
};

use crate::ranks::{Outcome, Rank, Scenario, ensure, scenario, text, within};
use crate::{folder, unusable};

const HPU: Device = Device::new(DeviceKind::Hpu, 0);

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("the_dylib_passes_its_probe_and_says_what_it_is", 1, probed),
        scenario("the_dylib_reduces_between_processes_in_stream_order", 2, reduces),
        scenario("a_time_out_crosses_the_boundary_with_its_context", 2, times_out)
            .faults(&[(0, "STALL", "2"), (1, "STALL", "2")]),
        scenario("a_missing_library_crosses_the_boundary_typed", 1, no_library)
            .with_libraries(unusable::empty),
        scenario("a_hanging_driver_is_found_in_the_child", 1, hangs_in_probe).faults(&[(
            0,
            "HANG",
            "synInitialize#1",
        )]),
    ]
}

/// The plugin's dylib: cargo builds it with these tests, beside them.
fn dylib() -> PathBuf {
    folder::library().with_file_name("liboxccl_hccl.so")
}

fn probed(_: &Rank) -> Outcome {
    let loaded = load(&dylib()).map_err(text)?;
    ensure!(loaded.name() == "hccl", "it is called {}", loaded.name());
    ensure!(
        loaded.version() == env!("CARGO_PKG_VERSION"),
        "version {}",
        loaded.version()
    );
    ensure!(loaded.devices() == [DeviceKind::Hpu], "{:?}", loaded.devices());
    let registry = Registry::new();
    let outcomes = loaded.register(&registry, OnConflict::Strict).map_err(text)?;
    ensure!(
        outcomes.iter().map(|(_, o)| o).eq([&Registered::Registered]),
        "{outcomes:?}"
    );
    let backend = registry.get("HCCL", None).map_err(text)?;
    ensure!(
        backend.source.provenance == Provenance::Plugin,
        "{}",
        backend.source
    );
    registry.is_backend_available("hccl", None).map_err(text)?;
    let library = backend.factory.library().ok_or("no library was found")?;
    ensure!(library.contains("stand-in"), "{library}");
    let capabilities = backend.factory.capabilities();
    ensure!(
        capabilities == oxccl_hccl::ftcore::registry::BackendFactory::capabilities(&oxccl_hccl::HcclFactory),
        "the capabilities changed on the way: {capabilities:?}"
    );
    Ok(())
}

/// A group through the registry, from the dylib.
fn group(rank: &Rank) -> Outcome<Box<dyn ProcessGroup>> {
    let registry = Registry::new();
    let loaded = open_trusted(&dylib()).map_err(text)?;
    loaded.register(&registry, OnConflict::Keep).map_err(text)?;
    let group = registry
        .create("hccl", &HPU, &GroupOptions::default())
        .map_err(text)?;
    group
        .configure(Configuration {
            prefix: "loaded".to_string(),
            ..rank.configuration(1)
        })
        .map_err(text)?;
    Ok(group)
}

fn all_reduce(hpu: &dyn Accelerator) -> Outcome<Collective> {
    let stream = hpu.current_stream(0).map_err(text)?;
    let mut tensor = hpu.alloc(0, DType::F32, &[5000]).map_err(text)?;
    let bytes: Vec<u8> = (0..5000).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    hpu.copy_in(&bytes, &mut tensor, &*stream).map_err(text)?;
    Ok(Collective::AllReduce {
        tensors: vec![tensor],
        op: ReduceOp::Sum,
    })
}

fn reduces(rank: &Rank) -> Outcome {
    let group = group(rank)?;
    let hpu = accelerator(&DeviceKind::Hpu).map_err(text)?;
    let stream = hpu.new_stream(0, false).map_err(text)?;
    for _ in 0..20 {
        let options = SubmitOptions {
            stream: Some(stream.clone()),
            ..SubmitOptions::by(rank.soon())
        };
        let work = group.run(all_reduce(&*hpu)?, options).map_err(text)?;
        work.wait_on(&*stream).map_err(text)?;
        let tensor = work.take_tensor().map_err(text)?;
        ensure!(*tensor.device() == HPU, "the result is on {}", tensor.device());
        let mut bytes = vec![0u8; tensor.byte_len()];
        hpu.copy_out(&tensor, &mut bytes, &*stream).map_err(text)?;
        let right = bytes
            .as_chunks::<4>()
            .0
            .iter()
            .zip(0..)
            .all(|(c, i)| f32::from_ne_bytes(*c) == 2.0 * i as f32);
        ensure!(right, "the sum through the dylib is wrong");
    }
    ensure!(group.traffic().sent == 20 * 20_000, "{:?}", group.traffic());
    group.shutdown(rank.soon()).map_err(text)
}

fn times_out(rank: &Rank) -> Outcome {
    let group = group(rank)?;
    let hpu = accelerator(&DeviceKind::Hpu).map_err(text)?;
    let first = group
        .run(all_reduce(&*hpu)?, SubmitOptions::by(rank.soon()))
        .map_err(text)?;
    first.wait(rank.soon()).map_err(text)?;
    let work = group
        .run(all_reduce(&*hpu)?, SubmitOptions::by(within(400)))
        .map_err(text)?;
    let e = rank.failure(&work)?;
    ensure!(e.kind() == ErrorKind::Timeout, "{:?}: {e}", e.kind());
    for word in ["all_reduce", "on the device"] {
        ensure!(e.to_string().contains(word), "'{word}' is not in: {e}");
    }
    let Err(rejected) = group.run(all_reduce(&*hpu)?, SubmitOptions::default()) else {
        return Err("a poisoned group accepted work".to_string());
    };
    ensure!(rejected.error.kind() == ErrorKind::Poisoned, "{}", rejected.error);
    Ok(())
}

fn no_library(_: &Rank) -> Outcome {
    // Loading works: what is missing is not the plugin's own.
    let loaded = load(&dylib()).map_err(text)?;
    let registry = Registry::new();
    loaded.register(&registry, OnConflict::Keep).map_err(text)?;
    let Err(e) = registry.is_backend_available("hccl", None) else {
        return Err("available without the vendor's libraries".to_string());
    };
    match Unavailable::of(&e) {
        Some(Unavailable::LibraryNotFound { library, searched }) => {
            ensure!(library.contains("libSynapse.so") && !searched.is_empty(), "{e}");
            Ok(())
        }
        other => Err(format!("{other:?}: {e}")),
    }
}

/// What hangs in the vendor's library hangs in the child; this process learns it within the limit.
fn hangs_in_probe(_: &Rank) -> Outcome {
    let began = std::time::Instant::now();
    let Err(e) = plugin::load_within(&dylib(), std::time::Duration::from_millis(1500)) else {
        return Err("a plugin that hangs in its probe was opened".to_string());
    };
    ensure!(
        matches!(Unavailable::of(&e), Some(Unavailable::ProbeTimedOut { .. })),
        "{e}"
    );
    ensure!(began.elapsed().as_secs() < 20, "it took {:?}", began.elapsed());
    Ok(())
}

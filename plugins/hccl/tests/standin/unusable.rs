//! Libraries that cannot be used: each for its own typed reason, and nothing crashes.

use std::path::PathBuf;

use oxccl_hccl::HcclFactory;
use oxccl_hccl::HpuAccelerator;
use oxccl_hccl::ftcore::registry::{BackendFactory, Unavailable};
use oxccl_hccl::ftcore::{Accelerator, DType, Device, DeviceKind, Error, ErrorKind, GroupOptions};

use crate::folder;
use crate::ranks::{Outcome, Rank, Scenario, ensure, scenario};

pub(crate) fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("a_missing_library_says_where_it_was_looked_for", 1, no_library).with_libraries(empty),
        scenario("a_file_that_is_no_library_says_so", 1, no_elf).with_libraries(text_file),
        scenario("a_missing_function_is_named", 1, no_function).with_libraries(without_all_reduce),
        scenario(
            "a_missing_function_of_the_runtime_is_named",
            1,
            no_runtime_function,
        )
        .with_libraries(without_events),
        scenario("functions_that_are_not_needed_may_be_missing", 1, optional_ones)
            .with_libraries(without_optional_ones),
        scenario("hccl_inside_libsynapse_is_found", 1, one_library).with_libraries(only_synapse),
        scenario("an_old_version_is_refused_with_both_numbers", 1, old).faults(&[(0, "VERSION", "1400")]),
        scenario("no_device_is_a_reason", 1, no_device).faults(&[(0, "DEVICES", "0")]),
        scenario("a_runtime_that_does_not_start_is_a_reason", 1, no_start).faults(&[(
            0,
            "FAIL",
            "synInitialize#1=26,synInitialize#2=26",
        )]),
        scenario(
            "a_module_that_does_not_exist_is_an_error_of_the_driver",
            1,
            no_module,
        )
        .faults(&[(0, "DEVICES", "2"), (0, "OXCCL_HCCL_MODULE_ID", "2")]),
        scenario("a_module_number_that_is_none_is_refused", 1, no_number).faults(&[(
            0,
            "HLS_MODULE_ID",
            "two",
        )]),
        scenario("our_module_variable_goes_before_the_vendors", 1, own_first)
            .faults(&[(0, "HLS_MODULE_ID", "two"), (0, "OXCCL_HCCL_MODULE_ID", "1")]),
    ]
}

/// A folder of these tests, the same in every run.
fn place(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).expect("the target folder is writable");
    folder
}

/// A folder with nothing in it.
pub(crate) fn empty() -> PathBuf {
    place("empty")
}

fn text_file() -> PathBuf {
    let folder = place("text");
    for name in ["libhccl.so", "libSynapse.so"] {
        std::fs::write(folder.join(name), "not a library").expect("the target folder is writable");
    }
    folder
}

/// A copy of the stand-in without some functions: their names are changed where the loader looks them up.
fn without(names: &[&str], folder: &str) -> PathBuf {
    let mut bytes = std::fs::read(folder::library()).expect("the stand-in can be read");
    for name in names {
        let pattern = [&[0], name.as_bytes(), &[0]].concat();
        let places: Vec<usize> = bytes
            .windows(pattern.len())
            .enumerate()
            .filter(|(_, w)| *w == pattern)
            .map(|(i, _)| i)
            .collect();
        assert!(!places.is_empty(), "the stand-in has no {name}");
        for place in places {
            bytes[place + pattern.len() - 2] = b'_';
        }
    }
    let folder = place(folder);
    for name in ["libhccl.so", "libSynapse.so"] {
        std::fs::write(folder.join(name), &bytes).expect("the target folder is writable");
    }
    folder
}

fn without_all_reduce() -> PathBuf {
    without(&["hcclAllReduce"], "no-all_reduce")
}

fn without_events() -> PathBuf {
    without(&["synEventQuery"], "no-events")
}

fn without_optional_ones() -> PathBuf {
    without(
        &[
            "hcclGetVersionString",
            "hcclCommFinalize",
            "hcclGetLastErrorMessage",
            "hcclCommGetAsyncErrorMessage",
            "synDriverGetVersion",
            "synStatusGetBriefDescription",
        ],
        "no-optional",
    )
}

/// As Intel's programs link it: everything in libSynapse.so.
fn only_synapse() -> PathBuf {
    folder::with_links("synapse", &["libSynapse.so"])
}

/// The reason for which the backend is not usable; it is the same wherever one meets it.
fn reason() -> Outcome<Unavailable> {
    let Err(e) = HcclFactory.probe() else {
        return Err("the probe passed".to_string());
    };
    ensure!(e.kind() == ErrorKind::Unsupported, "{:?}: {e}", e.kind());
    ensure!(HpuAccelerator.count() == 0, "devices are counted all the same");
    ensure!(
        HpuAccelerator.alloc(0, DType::F32, &[1]).is_err(),
        "memory all the same"
    );
    let device = Device::new(DeviceKind::Hpu, 0);
    let Err(again) = HcclFactory.create(&device, &GroupOptions::default()) else {
        return Err("a group all the same".to_string());
    };
    ensure!(again.to_string() == e.to_string(), "first '{e}', then '{again}'");
    typed(&e)
}

fn typed(e: &Error) -> Outcome<Unavailable> {
    Unavailable::of(e)
        .cloned()
        .ok_or_else(|| format!("no typed reason in: {e}"))
}

fn no_library(_: &Rank) -> Outcome {
    match reason()? {
        Unavailable::LibraryNotFound { library, searched } => {
            ensure!(
                library.contains("libSynapse.so") && library.contains("OXCCL_HCCL_PATH"),
                "{library}"
            );
            ensure!(searched.iter().any(|s| s.contains("/empty/")), "{searched:?}");
            ensure!(HcclFactory.library().is_none(), "a library was found");
            Ok(())
        }
        other => Err(format!("{other:?}")),
    }
}

fn no_elf(_: &Rank) -> Outcome {
    match reason()? {
        Unavailable::LibraryNotLoadable { library, text } => {
            ensure!(
                library.contains("libSynapse.so") && !text.is_empty(),
                "{library}: {text}"
            );
            Ok(())
        }
        other => Err(format!("{other:?}")),
    }
}

fn lacks(symbol: &str) -> Outcome {
    match reason()? {
        Unavailable::SymbolMissing { symbol: missing, .. } if missing == symbol => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

fn no_function(_: &Rank) -> Outcome {
    lacks("hcclAllReduce")
}

fn no_runtime_function(_: &Rank) -> Outcome {
    lacks("synEventQuery")
}

fn optional_ones(rank: &Rank) -> Outcome {
    HcclFactory.probe().map_err(|e| e.to_string())?;
    let library = HcclFactory.library().ok_or("no library was found")?;
    ensure!(
        library.contains("HCCL 2.6.4") && library.contains("driver unknown"),
        "{library}"
    );
    rank.sum_of_ones(&rank.group()?)
}

fn one_library(rank: &Rank) -> Outcome {
    let library = HcclFactory.library().ok_or("no library was found")?;
    ensure!(!library.contains("libhccl.so"), "{library}");
    rank.sum_of_ones(&rank.group()?)
}

fn old(_: &Rank) -> Outcome {
    match reason()? {
        Unavailable::VersionTooOld { found, needed, .. } => {
            ensure!(
                (found.as_str(), needed.as_str()) == ("1.4.0", "2.0.0"),
                "{found} and {needed}"
            );
            Ok(())
        }
        other => Err(format!("{other:?}")),
    }
}

fn no_device(_: &Rank) -> Outcome {
    match reason()? {
        Unavailable::NoDevice { device } if device == "hpu" => Ok(()),
        other => Err(format!("{other:?}")),
    }
}

fn no_start(_: &Rank) -> Outcome {
    let Err(e) = HcclFactory.probe() else {
        return Err("the probe passed".to_string());
    };
    match typed(&e)? {
        Unavailable::InitFailed { code: Some(26), text } => {
            ensure!(text.contains("synInitialize failed"), "{text}");
        }
        other => return Err(format!("{other:?}")),
    }
    // Whatever it was may be over: the third attempt starts.
    ensure!(HcclFactory.probe().is_err(), "the second attempt was not to work");
    HcclFactory.probe().map_err(|e| e.to_string())
}

fn no_module(_: &Rank) -> Outcome {
    let Err(e) = HpuAccelerator.name(0) else {
        return Err("module 2 of 2 was acquired".to_string());
    };
    ensure!(
        e.kind() == ErrorKind::Backend && e.code() == Some(8),
        "{:?}: {e}",
        e.code()
    );
    ensure!(e.to_string().contains("synDeviceAcquireByModuleId"), "{e}");
    Ok(())
}

fn no_number(_: &Rank) -> Outcome {
    let Err(e) = HpuAccelerator.name(0) else {
        return Err("module 'two' was acquired".to_string());
    };
    ensure!(
        e.kind() == ErrorKind::InvalidArgument && e.to_string().contains("HLS_MODULE_ID"),
        "{e}"
    );
    Ok(())
}

fn own_first(_: &Rank) -> Outcome {
    HpuAccelerator.name(0).map_err(|e| e.to_string()).map(drop)
}

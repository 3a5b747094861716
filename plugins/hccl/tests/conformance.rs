//! The one suite that every backend must pass, with processes as ranks, over the stand-in (or over real Gaudis, if
//! `OXCCL_HCCL_PATH` names the vendor's libraries). With `OXCCL_TEST_HCCL_AS=dylib` the group is the plugin's, through the
//! host's loader and registry; without it, it is linked in. Without arguments and variables both are run.

#![allow(clippy::expect_used, reason = "preparing a test may panic, with its reason")]

use std::process::{Command, ExitCode};
use std::sync::Arc;

use conformance::{Limit, MakeOn, Mode, Plan};
use oxccl_hccl::ftcore::registry::{BackendFactory, OnConflict, Registry};
use oxccl_hccl::ftcore::{Device, DeviceKind, Result, register_accelerator};
use oxccl_hccl::{HcclFactory, HpuAccelerator};

#[path = "standin/folder.rs"]
mod folder;

const AS: &str = "OXCCL_TEST_HCCL_AS";

fn main() -> ExitCode {
    let (make, limit) = match std::env::var(AS).as_deref() {
        Ok("linked") => (linked(), Limit::NONE),
        Ok("dylib") => {
            let why =
                "larger worlds differ only in the backend, which is linked for them; OXCCL_LONG=1 runs them";
            (dylib(), Limit::unless_long(2, why))
        }
        _ => return each_way(),
    };
    match make {
        Ok(make) => {
            let plan = Plan::new(Device::new(DeviceKind::Hpu, 0), &[Mode::Processes], make);
            let lasting = true;
            Plan {
                lasting,
                limit,
                ..plan
            }
            .run()
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn linked() -> Result<MakeOn> {
    register_accelerator(Arc::new(HpuAccelerator))?;
    Ok(Arc::new(|device, options| HcclFactory.create(device, &options)))
}

fn dylib() -> Result<MakeOn> {
    let registry = Registry::new();
    let loaded = plugin::open_trusted(&folder::library().with_file_name("liboxccl_hccl.so"))?;
    loaded.register(&registry, OnConflict::Strict)?;
    Ok(Arc::new(move |device, options| {
        registry.create("hccl", device, &options)
    }))
}

/// This program again, both ways, with the stand-in in its environment unless another library is: the environment cannot
/// be changed safely from inside.
fn each_way() -> ExitCode {
    let mut passed = true;
    for way in ["linked", "dylib"] {
        println!("hccl {way}");
        let libraries = std::env::var_os("OXCCL_HCCL_PATH").unwrap_or_else(|| folder::standin().into());
        let program = std::env::current_exe().expect("this program has a path");
        let status = Command::new(program)
            .args(std::env::args_os().skip(1))
            .env("OXCCL_HCCL_PATH", libraries)
            .env(AS, way)
            .status();
        passed &= status.is_ok_and(|s| s.success());
    }
    if passed {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

//! Streams, memory and devices of `xpu` at work: order on a queue without a wait, queues that the caller brings, who gets which
//! device, failures, isolation, and training state that lives on the device. On the real oneCCL and SYCL's CPU device; each case
//! runs in processes of its own, which are this binary started again.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a rank that panics is a failed rank, and says where"
)]

#[path = "xpu/groups.rs"]
mod groups;
#[path = "xpu/order.rs"]
mod order;
#[path = "xpu/training.rs"]
mod training;

use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_xccl::{XcclXpuFactory, XpuGroup};
use ftcore::registry::BackendFactory;
use ftcore::{
    Accelerator, Configuration, DType, Device, DeviceKind, Epoch, GroupOptions, ProcessGroup, Store, Stream,
    TcpStore, TcpStoreServer, Tensor, accelerator, deadline_in,
};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

const CASE: &str = "OXCCL_XPU_CASE";
const RANK: &str = "OXCCL_XPU_RANK";
const STORE: &str = "OXCCL_XPU_STORE";

type Outcome<T = ()> = Result<T, Failed>;

/// What a case knows.
struct Rank {
    rank: u32,
    store: Arc<dyn Store>,
}

struct Case {
    name: &'static str,
    world: u32,
    environment: &'static [(&'static str, &'static str)],
    body: fn(&Rank) -> Outcome,
}

/// The CPU device twice, as two devices.
const TWO: &[(&str, &str)] = &[("OXCCL_XPU_DEVICES", "cpu,cpu")];

const fn case(name: &'static str, world: u32, body: fn(&Rank) -> Outcome) -> Case {
    Case {
        name,
        world,
        environment: &[],
        body,
    }
}

const CASES: [Case; 15] = [
    case(
        "l09_a_fill_a_reduction_and_a_copy_on_one_queue_need_no_wait",
        2,
        order::one_queue,
    ),
    case(
        "l09_without_the_stream_the_reduction_overtakes_the_fill",
        2,
        order::queue_ignored,
    ),
    case(
        "a_queue_that_the_caller_brought_is_ordered_both_ways",
        2,
        order::adopted,
    ),
    case(
        "a_stream_that_waits_for_a_failed_operation_says_so",
        2,
        order::failed,
    ),
    case(
        "copies_after_a_call_are_done_when_their_events_say_so",
        2,
        order::copies_after_calls,
    ),
    case(
        "memory_given_up_in_the_middle_of_a_copy_is_freed_after_it",
        1,
        order::given_up,
    ),
    case("xpu_without_a_backend_named_is_xccl", 1, groups::registry),
    Case {
        environment: TWO,
        ..case(
            "replica_groups_of_a_host_take_turns_at_its_devices",
            2,
            groups::turns,
        )
    },
    case("messages_are_refused_with_the_reason", 1, groups::messages),
    case("shared_usm_memory_is_reduced_too", 2, groups::shared),
    Case {
        environment: &[("CCL_PLUGIN", "ONECCL_LEGACY_CPU")],
        ..case("a_plugin_that_ignores_queues_is_refused", 1, groups::plugin)
    },
    case(
        "an_isolated_group_serves_xpu_tensors_through_usm_host_memory",
        1,
        groups::isolated_on_host,
    ),
    case(
        "an_isolated_group_on_the_xpu_is_staged_on_both_sides",
        1,
        groups::isolated_on_device,
    ),
    Case {
        environment: TWO,
        ..case(
            "diloco_over_device_memory_and_a_side_stream_changes_no_bit",
            1,
            training::diloco_rounds,
        )
    },
    case(
        "a_checkpoint_is_what_the_device_held_when_it_was_taken",
        1,
        training::snapshot,
    ),
];

fn soon() -> Instant {
    deadline_in(Duration::from_secs(40))
}

fn ensure(ok: bool, text: impl FnOnce() -> String) -> Outcome {
    if ok { Ok(()) } else { Err(text().into()) }
}

/// Device memory and a stream of one xpu.
struct Memory {
    xpu: Arc<dyn Accelerator>,
    index: u32,
}

impl Memory {
    fn on(index: u32) -> Outcome<Self> {
        let xpu = accelerator(&DeviceKind::Xpu)?;
        Ok(Self { xpu, index })
    }

    fn device(&self) -> Device {
        Device::new(DeviceKind::Xpu, self.index)
    }

    fn stream(&self) -> Outcome<Arc<dyn Stream>> {
        Ok(self.xpu.new_stream(self.index, false)?)
    }

    fn empty(&self, count: usize) -> Outcome<Tensor> {
        Ok(self.xpu.alloc(self.index, DType::F32, &[count])?)
    }

    /// A tensor with these values, all there.
    fn with(&self, values: &[f32]) -> Outcome<Tensor> {
        let stream = self.stream()?;
        let mut tensor = self.empty(values.len())?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
        self.xpu.copy_in(&bytes, &mut tensor, &*stream)?;
        stream.synchronize(soon())?;
        Ok(tensor)
    }

    fn read(&self, tensor: &Tensor, stream: &dyn Stream) -> Outcome<Vec<f32>> {
        let mut bytes = vec![0u8; tensor.byte_len()];
        self.xpu.copy_out(tensor, &mut bytes, stream)?;
        Ok(bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_ne_bytes(*b))
            .collect())
    }
}

fn configuration(rank: &Rank, world: u32, epoch: u64) -> Configuration {
    Configuration {
        store: rank.store.clone(),
        prefix: "xpu".into(),
        name: "xpu".into(),
        epoch: Epoch(epoch),
        rank: rank.rank,
        world_size: world,
        deadline: soon(),
        cancel: Default::default(),
    }
}

/// A configured group of two ranks on xpu `index`.
fn group(rank: &Rank, index: u32) -> Outcome<XpuGroup> {
    let device = Device::new(DeviceKind::Xpu, index);
    let group = XpuGroup::new("xpu", &device, GroupOptions::default())?;
    group.configure(configuration(rank, 2, 1))?;
    Ok(group)
}

fn run(case: &Case) -> Outcome {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let program = std::env::current_exe()?;
    let children: Vec<_> = (0..case.world)
        .map(|rank| {
            Command::new(&program)
                .env(CASE, case.name)
                .env(RANK, rank.to_string())
                .env(STORE, format!("127.0.0.1:{}", server.port()))
                .envs(case.environment.iter().copied())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
        })
        .collect::<Result<_, _>>()?;
    let mut failures = String::new();
    for child in children {
        let output = child.wait_with_output()?;
        if !output.status.success() {
            failures += &format!("{}: {}\n", output.status, String::from_utf8_lossy(&output.stderr));
        }
    }
    ensure(failures.is_empty(), || failures.clone())
}

fn child(name: &str) -> Outcome {
    let address = std::env::var(STORE)?;
    let rank = Rank {
        rank: std::env::var(RANK)?.parse()?,
        store: Arc::new(TcpStore::connect(&address, soon())?),
    };
    let case = CASES.iter().find(|c| c.name == name).ok_or("no such case")?;
    (case.body)(&rank)
}

fn main() -> ExitCode {
    isolate::run_child_if_asked();
    if let Ok(name) = std::env::var(CASE) {
        return match child(&name) {
            Ok(()) => ExitCode::SUCCESS,
            Err(failed) => {
                eprintln!("{}", failed.message().unwrap_or("failed"));
                ExitCode::FAILURE
            }
        };
    }
    let mut arguments = Arguments::from_args();
    // Every rank is a SYCL runtime with a thread per core.
    arguments.test_threads.get_or_insert(1);
    let reason = XcclXpuFactory.probe().err().map(|e| e.to_string());
    let trials = CASES
        .iter()
        .map(|case| {
            let reason = reason.clone();
            Trial::ignorable_test(case.name, move || match reason {
                Some(reason) => Ok(Completion::ignored_with(reason)),
                None => run(case).map(|()| Completion::Completed),
            })
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

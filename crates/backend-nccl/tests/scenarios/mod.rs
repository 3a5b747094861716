//! The scenarios of `errors.rs`: a name, what is injected, and what must be seen.

mod abstaining;
mod between;
mod calls;
mod creation;
mod credentials;
mod crossing;
mod devices;
mod endings;
mod failures;
mod isolated;
mod kit;
mod late;
mod lost;
mod parts;
mod pinned;
mod rendezvous;
mod set_up;
mod staged;
mod system;

use kit::Outcome;

/// A name, what is injected, and what must be seen.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) environment: Vec<(&'static str, &'static str)>,
    pub(crate) body: fn() -> Outcome,
    /// A line that the log has once the process has ended.
    pub(crate) left: Option<&'static str>,
    /// It says something of so many devices. Where ranks only need one each, they may share it.
    pub(crate) devices: u32,
    /// It says nothing of a GPU.
    pub(crate) only_standin: bool,
}

impl Scenario {
    fn leaving(self, line: &'static str) -> Self {
        Self {
            left: Some(line),
            ..self
        }
    }

    fn on_the_stand_in(self) -> Self {
        Self {
            only_standin: true,
            ..self
        }
    }

    fn of_devices(self, devices: u32) -> Self {
        Self { devices, ..self }
    }

    /// Why it says nothing of a GPU; `None` if it does.
    pub(crate) fn takes_a_stand_in(&self) -> Option<&'static str> {
        let slow = "OXCCL_STANDIN_CUDA_DELAY_US";
        match self.environment.iter().all(|(name, _)| *name == slow) {
            false => Some("it injects a fault, which takes the stand-in"),
            true if self.only_standin => Some("it is about the stand-in"),
            true => None,
        }
    }

    /// True if the system is to refuse something.
    pub(crate) fn is_refused(&self) -> bool {
        self.environment.iter().any(|(_, value)| *value == "@refuse")
    }
}

fn scenario(
    name: &'static str,
    environment: &[(&'static str, &'static str)],
    body: fn() -> Outcome,
) -> Scenario {
    Scenario {
        name,
        environment: environment.to_vec(),
        body,
        left: None,
        devices: 1,
        only_standin: false,
    }
}

const FAIL: &str = "OXCCL_STANDIN_NCCL_FAIL";
const HANG: &str = "OXCCL_STANDIN_NCCL_HANG";
const ASYNC: &str = "OXCCL_STANDIN_NCCL_ASYNC";

/// All of them.
pub(crate) fn scenarios() -> Vec<Scenario> {
    [
        of_groups(),
        calls::scenarios(),
        abstaining::scenarios(),
        creation::scenarios(),
        credentials::scenarios(),
        devices::scenarios(),
        pinned::scenarios(),
        parts::scenarios(),
        endings::scenarios(),
        rendezvous::scenarios(),
        staged::scenarios(),
        isolated::scenarios(),
        system::scenarios(),
        late::scenarios(),
        between::scenarios(),
        lost::scenarios(),
        crossing::scenarios(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn of_groups() -> Vec<Scenario> {
    vec![
        scenario(
            "a_call_that_fails_names_the_call_its_code_and_the_operation",
            &[(FAIL, "ncclAllReduce@1:3:1")],
            failures::call_fails,
        ),
        scenario(
            "a_call_that_fails_at_group_end_fails_the_group",
            &[(FAIL, "ncclGroupEnd:5:3")],
            failures::group_end_fails,
        ),
        scenario(
            "init_that_fails_fails_configure_on_that_rank",
            &[(FAIL, "ncclCommInitRankConfig@1:1:2")],
            failures::init_fails,
        ),
        scenario(
            "init_that_hangs_ends_at_the_deadline_and_names_the_phase",
            &[(HANG, "call:ncclCommInitRankConfig@1:1")],
            failures::init_hangs,
        ),
        scenario(
            "l36_an_asynchronous_error_fails_the_group_and_not_the_process",
            &[(ASYNC, "ncclAllReduce@0:3:6")],
            failures::asynchronous,
        ),
        scenario(
            "l36_an_asynchronous_error_after_the_submission_is_noticed",
            &[
                (ASYNC, "ncclAllReduce@0:3:6"),
                ("OXCCL_STANDIN_CUDA_DELAY_US", "30000"),
            ],
            failures::asynchronous,
        ),
        scenario(
            "l35_the_deadline_counts_from_submission_even_behind_a_blocked_stream",
            &[(HANG, "device:ncclAllReduce@0:1")],
            failures::blocked_stream,
        ),
        scenario(
            "work_that_never_ends_is_ended_at_its_deadline_and_gives_its_tensor_back",
            &[(HANG, "device:ncclAllReduce@0:1")],
            failures::device_hangs,
        ),
        scenario(
            "l27_an_abort_that_takes_as_long_as_the_real_one_gives_the_tensor_back",
            &[
                (HANG, "device:ncclAllReduce@0:1"),
                ("OXCCL_STANDIN_NCCL_ABORT_MS", "520"),
            ],
            failures::device_hangs,
        ),
        scenario(
            "l27_an_abort_that_hangs_leaks_the_memory_and_is_given_up",
            &[(HANG, "device:ncclAllReduce@0:1,call:ncclCommAbort@0:1")],
            failures::abort_hangs,
        ),
        scenario(
            "a_call_that_hangs_fails_the_work_of_the_others_and_ends_with_the_abort",
            &[(HANG, "call:ncclAllReduce@0:3")],
            failures::call_hangs,
        ),
        scenario(
            "no_memory_on_the_device_is_an_error_of_the_driver",
            &[(FAIL, "cuMemAllocAsync:8:2")],
            set_up::no_memory,
        ),
        scenario(
            "a_lost_event_fails_the_group",
            &[(FAIL, "cuEventQuery:40:700")],
            failures::event_fails,
        ),
        scenario(
            "call_of_one_thread_is_inside_while_others_ask_how_it_is",
            &[
                ("OXCCL_STANDIN_NCCL_JOIN_MS", "1"),
                ("OXCCL_STANDIN_CUDA_DELAY_US", "300"),
            ],
            failures::back_to_back,
        ),
        scenario(
            "kernels_that_do_not_compile_fail_the_creation",
            &[(FAIL, "cuModuleLoadData:1:218")],
            set_up::no_kernels,
        ),
        scenario(
            "no_device_is_said_by_the_probe",
            &[("OXCCL_STANDIN_CUDA_DEVICES", "0")],
            set_up::no_device,
        ),
        scenario(
            "no_driver_is_said_by_the_probe",
            &[("OXCCL_CUDA_PATH", "/nowhere/libcuda.so.1")],
            set_up::no_driver,
        ),
        scenario(
            "no_library_is_said_by_the_probe",
            &[("OXCCL_NCCL_PATH", "/nowhere/libnccl.so.2")],
            set_up::no_library,
        ),
        scenario(
            "an_old_library_is_refused_with_both_versions",
            &[("OXCCL_STANDIN_NCCL_VERSION", "22602")],
            set_up::too_old,
        ),
        scenario(
            "a_device_that_does_not_exist_is_named",
            &[],
            set_up::no_such_device,
        ),
        scenario(
            "l42_every_option_reaches_the_library_at_create_reconfigure_and_split",
            &[("OXCCL_STANDIN_NCCL_LOG", "@log")],
            set_up::options_arrive,
        ),
        scenario(
            "l42_every_option_has_a_variable_that_reaches_the_library_on_each_path",
            &set_up::VARIABLES,
            set_up::variables_arrive,
        ),
        scenario(
            "l42_every_option_as_a_hint_reaches_the_library_before_its_variable",
            &[
                ("OXCCL_STANDIN_NCCL_LOG", "@log"),
                ("OXCCL_NCCL_MIN_CTAS", "1"),
                ("OXCCL_NCCL_NET_NAME", "IB"),
                ("OXCCL_NCCL_BLOCKING", "0"),
            ],
            set_up::hints_arrive,
        ),
        scenario(
            "l42_every_variable_reaches_the_library_of_an_isolated_group",
            &set_up::VARIABLES,
            set_up::isolated_variables_arrive,
        ),
        scenario(
            "inv9_what_is_not_acted_on_is_reported_to_who_is_lenient",
            &[("OXCCL_NCCL_NO_SUCH", "1")],
            set_up::drops_are_reported,
        ),
        scenario(
            "names_of_communicators_stay_as_long_as_they",
            &[("OXCCL_STANDIN_NCCL_LOG", "@log")],
            set_up::names_stay,
        ),
        scenario(
            "contributors_may_be_left_out_of_the_count",
            &[],
            set_up::without_counting,
        ),
        scenario(
            "l09_slow_streams_show_no_missing_order",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "1500")],
            failures::slow_streams,
        ),
        scenario(
            "a_chip_before_9_0_does_not_reduce_8_bit_floats",
            &[("OXCCL_STANDIN_CUDA_CC", "89")],
            || set_up::fp8(false),
        ),
        scenario("one_of_9_0_does", &[("OXCCL_STANDIN_CUDA_CC", "90")], || {
            set_up::fp8(true)
        }),
        scenario(
            "the_description_says_that_this_is_a_stand_in",
            &[],
            set_up::says_what_it_is,
        )
        .on_the_stand_in(),
        scenario(
            "split_that_fails_says_so_and_poisons_nobody_silently",
            &[(FAIL, "ncclCommSplit@1:1:5")],
            failures::split_fails,
        ),
        scenario(
            "dropping_memory_while_a_copy_is_under_way_is_safe",
            &[("OXCCL_STANDIN_CUDA_DELAY_US", "3000")],
            failures::early_drop,
        ),
        scenario(
            "a_library_without_the_newer_functions_works",
            &[
                ("OXCCL_NCCL_PATH", "@old"),
                ("OXCCL_CUDA_PATH", "@old"),
                ("OXCCL_STANDIN_NCCL_VERSION", "22703"),
            ],
            set_up::old_functions,
        ),
        scenario(
            "a_library_without_a_required_function_is_refused_by_its_name",
            &[("OXCCL_NCCL_PATH", "@broken")],
            set_up::missing_function,
        ),
    ]
}

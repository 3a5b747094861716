//! Two machines that are joined by a cable and have no default route: two network namespaces with a link between them. The ranks find each other
//! without a setting. Where no namespaces can be made the trial is ignored, with the reason.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]

use std::path::Path;
use std::process::{Command, ExitCode, Output};
use std::sync::Arc;
use std::time::Duration;

use backend_gloo::GlooGroup;
use ftcore::{
    Configuration, Epoch, FileStore, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, SubmitOptions,
    deadline_in, host_address,
};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The first argument of a rank; then come its number, the file of the store and its address on the cable.
const RANK: &str = "rank-at-the-cable";

/// Makes the two machines and runs "$0" with the rest as a rank in each. The remote one is a child's namespace, which is there once it differs.
const TWO_MACHINES: &str = r#"
set -e
ip link set lo up
unshare --net sleep 60 &
remote=$!
trap 'kill $remote' EXIT
n=0
while [ "$(readlink /proc/$remote/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do
    n=$((n + 1)); [ $n -lt 1000 ]; sleep 0.01
done
ip link add local type veth peer name remote
ip link set remote netns $remote
ip addr add 10.213.0.1/30 dev local
ip link set local up
nsenter --net=/proc/$remote/ns/net sh -e -c 'ip link set lo up; ip addr add 10.213.0.2/30 dev remote; ip link set remote up'
[ -z "$(ip route show default)" ]
if [ "$1" = probe ]; then exit 0; fi
nsenter --net=/proc/$remote/ns/net "$0" "$1" 1 "$2" 10.213.0.2 &
other=$!
"$0" "$1" 0 "$2" 10.213.0.1
wait $other
"#;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, what, number, file, address] = arguments.as_slice()
        && what == RANK
    {
        rank(number.parse().unwrap(), Path::new(file), address);
        return ExitCode::SUCCESS;
    }
    let trial = Trial::ignorable_test(
        "machines_joined_by_a_cable_find_each_other_without_a_default_route",
        || {
            let probe = run(&["sh", "probe"]);
            if !probe.status.success() {
                let why = String::from_utf8_lossy(&probe.stderr).trim().replace('\n', "; ");
                return Ok(Completion::ignored_with(format!(
                    "no network namespaces can be made here: {why}"
                )));
            }
            let program = std::env::current_exe().unwrap();
            let file = std::env::temp_dir().join(format!("oxccl-cable-{}", std::process::id()));
            let output = run(&[program.to_str().unwrap(), RANK, file.to_str().unwrap()]);
            drop(std::fs::remove_file(&file));
            match output.status.success() {
                true => Ok(Completion::Completed),
                false => Err(Failed::from(String::from_utf8_lossy(&output.stderr).into_owned())),
            }
        },
    );
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
}

/// Runs the script in namespaces of its own, with these arguments from `$0` on.
fn run(arguments: &[&str]) -> Output {
    let shell = ["--user", "--map-root-user", "--net", "sh", "-c", TWO_MACHINES];
    let output = Command::new("unshare")
        .args(shell)
        .args(arguments)
        .env("OXCCL_INSECURE", "1")
        .env_remove("OXCCL_GLOO_HOST")
        .output();
    output.unwrap_or_else(|e| {
        // No such program: the shell says so in its stead.
        let text = format!("echo 'unshare: {e}' >&2; exit 1");
        Command::new("sh").args(["-c", &text]).output().unwrap()
    })
}

fn rank(rank: u32, file: &Path, address: &str) {
    let found = host_address::outward(true).map(|ip| ip.to_string());
    assert_eq!(found.as_deref(), Some(address));
    let soon = || deadline_in(Duration::from_secs(20));
    let group = GlooGroup::new("cable", GroupOptions::default()).unwrap();
    let configuration = Configuration {
        store: Arc::new(FileStore::open(file).unwrap()),
        prefix: "cable".into(),
        name: "cable".into(),
        epoch: Epoch(1),
        rank,
        world_size: 2,
        deadline: soon(),
        cancel: Default::default(),
    };
    group.configure(configuration).unwrap();
    let mut values = [rank as f32 + 1.0; 3];
    let options = SubmitOptions::by(soon());
    group
        .all_reduce_slice_with(&mut values, ReduceOp::Sum, options)
        .unwrap();
    assert_eq!(values, [3.0; 3]);
    group.shutdown(soon()).unwrap();
}

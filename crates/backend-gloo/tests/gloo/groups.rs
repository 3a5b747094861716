//! Many groups between the same processes: what a further one costs, and that the end of one, or of a process, is told in each and nowhere else.
//! Ranks are processes here.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_gloo::GlooGroup;
use ftcore::{
    Configuration, Epoch, Error, ErrorKind, GroupOptions, ProcessGroup, ProcessGroupExt, ReduceOp, Store,
    SubmitOptions, TcpStore, TcpStoreServer, deadline_in,
};
use rustix::process::{Resource, Rlimit, Signal, getpid, getrlimit, kill_process, setrlimit};

use crate::ranks::eventually;
use crate::resources::{descriptors, memory, shared_memory, threads};

const SCENE: &str = "OXCCL_TEST_GROUPS";
const STORE: &str = "OXCCL_TEST_GROUPS_STORE";
const RANK: &str = "OXCCL_TEST_GROUPS_RANK";
const WORLD: &str = "OXCCL_TEST_GROUPS_WORLD";

/// The machine may be busy with other things; nothing here waits that long otherwise.
fn soon() -> Instant {
    deadline_in(Duration::from_secs(120))
}

/// Plays `scene` with `world` processes; what they printed. Of all but rank `dies` success is required.
fn play(scene: &str, world: u32, dies: Option<u32>) -> String {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let children: Vec<_> = (0..world)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "groups::rank",
                    "--ignored",
                    "--nocapture",
                    "--test-threads=1",
                ])
                .env(SCENE, scene)
                .env(STORE, server.local_addr().to_string())
                .env(RANK, rank.to_string())
                .env(WORLD, world.to_string())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    // Each has a thread that reads what it prints.
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let waits: Vec<_> = children
            .into_iter()
            .map(|child| scope.spawn(|| child.wait_with_output().unwrap()))
            .collect();
        waits.into_iter().map(|wait| wait.join().unwrap()).collect()
    });
    let mut printed = String::new();
    for (output, rank) in outputs.iter().zip(0..) {
        let text = String::from_utf8_lossy(&output.stdout);
        let errors = String::from_utf8_lossy(&output.stderr);
        let passed = output.status.success() && text.contains("1 passed");
        assert!(passed || dies == Some(rank), "rank {rank}:\n{text}\n{errors}");
        printed += &text;
    }
    printed
}

/// One of the processes.
struct Rank {
    store: Arc<dyn Store>,
    rank: u32,
    world: u32,
}

impl Rank {
    fn from_environment() -> Self {
        let number = |name| std::env::var(name).unwrap().parse().unwrap();
        let store = TcpStore::connect(&std::env::var(STORE).unwrap(), soon()).unwrap();
        Self {
            store: Arc::new(store),
            rank: number(RANK),
            world: number(WORLD),
        }
    }

    /// A group of all ranks.
    fn group(&self, name: &str) -> GlooGroup {
        let members: Vec<u32> = (0..self.world).collect();
        self.connect(name, &members, "auto", soon()).unwrap().unwrap()
    }

    /// This rank's group of `members`, if it is one.
    fn connect(
        &self,
        name: &str,
        members: &[u32],
        transport: &str,
        deadline: Instant,
    ) -> Result<Option<GlooGroup>, Error> {
        let Some(rank) = members.iter().position(|member| *member == self.rank) else {
            return Ok(None);
        };
        let mut options = GroupOptions::default();
        options.hints.insert("transport".into(), transport.into());
        let group = GlooGroup::new(name, options)?;
        group.configure(Configuration {
            store: self.store.clone(),
            prefix: name.into(),
            name: name.into(),
            epoch: Epoch(1),
            rank: rank as u32,
            world_size: members.len() as u32,
            deadline,
            cancel: Default::default(),
        })?;
        Ok(Some(group))
    }
}

/// Adds one of every rank.
fn count(group: &GlooGroup) -> f32 {
    let mut ones = [1f32];
    group
        .all_reduce_slice_with(&mut ones, ReduceOp::Sum, SubmitOptions::by(soon()))
        .unwrap();
    ones[0]
}

fn sockets() -> usize {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .filter(|to| to.to_string_lossy().starts_with("socket:"))
        .count()
}

/// Runs in processes of their own, see below.
#[test]
#[ignore = "run by the other tests of this file in processes of their own"]
fn rank() {
    let rank = Rank::from_environment();
    match std::env::var(SCENE).unwrap().as_str() {
        "many" => play_many(&rank),
        "subsets" => play_subsets(&rank),
        "come and go" => play_come_and_go(&rank),
        "soft limit" => play_soft_limit(&rank),
        "hard limit" => play_hard_limit(&rank),
        scene => panic!("no scene '{scene}'"),
    }
}

const MANY: usize = 512;
/// Of them, the one that is aborted.
const ABORTED: usize = 7;

fn play_many(rank: &Rank) {
    let first = rank.group("first");
    first.barrier().unwrap();
    let before = descriptors();
    let began = Instant::now();
    let groups: Vec<GlooGroup> = (0..MANY).map(|n| rank.group(&format!("group {n}"))).collect();
    let took = began.elapsed();
    let more = descriptors() - before;
    if rank.rank == 0 {
        let (seconds, world) = (took.as_secs_f64(), rank.world);
        println!(
            "{MANY} further groups of {world} processes: {seconds:.2} s, {more} descriptors more in each"
        );
    }
    assert!(more <= 2 * MANY, "{more} descriptors more");
    assert!(groups.iter().all(|group| count(group) == rank.world as f32));
    first.barrier().unwrap();

    // The abort of one leaves the others as they are.
    if rank.rank == 3 {
        groups[ABORTED].abort("over");
    }
    eventually("the abort", || groups[ABORTED].error().is_some());
    let error = groups[ABORTED].error().unwrap();
    assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
    assert!(
        error.to_string().contains("rank 3 aborted the group: over"),
        "{error}"
    );
    let others = || {
        (0..MANY)
            .filter(|n| *n != ABORTED)
            .map(|n| &groups[n])
            .chain([&first])
    };
    assert!(others().all(|group| count(group) == rank.world as f32));
    assert!(others().all(|group| group.error().is_none()));
    first.barrier().unwrap();

    // The death of a process is told in each.
    let dies = rank.world - 1;
    if rank.rank == dies {
        kill_process(getpid(), Signal::KILL).unwrap();
    }
    for group in others() {
        eventually("the loss", || group.error().is_some());
        let error = group.error().unwrap();
        assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
        assert_eq!(error.context().peer, Some(dies), "{error}");
    }
    assert_eq!(groups[ABORTED].error().unwrap().kind(), ErrorKind::Aborted);
}

#[test]
fn many() {
    let printed = play("many", 8, Some(7));
    let line = printed.lines().find(|line| line.contains("further groups"));
    println!("{}", line.unwrap());
}

fn play_subsets(rank: &Rank) {
    let (before, no_threads) = (sockets(), threads());
    // Together they have each pair at least twice, in both orders.
    let members: [&[u32]; 9] = [
        &[0, 1],
        &[2, 1],
        &[3, 2, 1, 0],
        &[1, 2],
        &[0, 3],
        &[2, 3, 0],
        &[1, 0, 3],
        &[0, 1, 2, 3],
        &[3, 2, 0],
    ];
    let groups: Vec<GlooGroup> = (0..)
        .zip(members)
        .filter_map(|(n, members)| rank.connect(&format!("{n}"), members, "auto", soon()).unwrap())
        .collect();
    let sizes = members.iter().filter(|members| members.contains(&rank.rank));
    for (group, members) in groups.iter().zip(sizes) {
        assert_eq!(count(group), members.len() as f32);
    }
    assert_eq!(sockets() - before, rank.world as usize - 1);
    // A line stays for as long as any group needs it.
    let mut groups = groups;
    let last = groups.pop().unwrap();
    drop(groups);
    // Its thread, and the one that watches the lines.
    eventually("the end of the others", || threads() == no_threads + 2);
    if rank.rank != 1 {
        eventually("the end of the line to rank 1", || sockets() - before == 2);
        assert_eq!(count(&last), 3.0);
    }
    last.shutdown(soon()).unwrap();
    eventually("the end of the lines", || {
        sockets() == before && threads() == no_threads
    });
}

#[test]
fn groups_of_different_members_share_one_connection_for_each_pair_of_processes() {
    play("subsets", 4, None);
}

fn play_come_and_go(rank: &Rank) {
    let no_threads = threads();
    let standing = rank.group("standing");
    // Its own, and the one that watches the line: a thread has its name only once it runs.
    eventually("its threads", || threads() == no_threads + 2);
    let round = |n: usize| {
        let group = rank.group(&format!("round {n}"));
        assert_eq!(count(&group), 2.0);
        drop(group);
    };
    let seen = || (descriptors(), shared_memory().0, threads());
    let before = seen();
    (0..100).for_each(round);
    let resident = memory("VmRSS:");
    (100..1000).for_each(round);
    eventually("the end of the threads", || seen().2 == before.2);
    eventually("the end of the memory", || seen().1 == before.1);
    eventually("the end of the descriptors", || seen().0 == before.0);
    let grown = memory("VmRSS:").saturating_sub(resident);
    assert!(grown < 4 << 10, "{grown} kB more after 900 groups");
    assert_eq!(count(&standing), 2.0);
}

#[test]
fn a_thousand_groups_that_come_and_go_leave_nothing_behind() {
    play("come and go", 2, None);
}

fn limit(current: u64, maximum: Option<u64>) {
    let new = Rlimit {
        current: Some(current),
        maximum,
    };
    setrlimit(Resource::Nofile, new).unwrap();
}

fn play_soft_limit(rank: &Rank) {
    let hard = getrlimit(Resource::Nofile).maximum;
    limit(64, hard);
    // Over TCP each has descriptors of its own.
    let groups: Vec<_> = (0..40)
        .map(|n| {
            rank.connect(&format!("{n}"), &[0, 1], "tcp", soon())
                .unwrap()
                .unwrap()
        })
        .collect();
    assert!(descriptors() > 64);
    assert_eq!(getrlimit(Resource::Nofile).current, hard);
    assert!(groups.iter().all(|group| count(group) == 2.0));
}

#[test]
fn a_limit_on_descriptors_is_raised_before_it_is_met() {
    play("soft limit", 2, None);
}

fn play_hard_limit(rank: &Rank) {
    limit(64, Some(64));
    let mut groups = Vec::new();
    let error = loop {
        let n = groups.len();
        // A rank that cannot even listen says nothing to the other.
        let deadline = deadline_in(Duration::from_secs(10));
        match rank.connect(&format!("{n}"), &[0, 1], "tcp", deadline) {
            Ok(group) => groups.push(group),
            Err(error) => break error,
        }
        assert!(n < 64, "no limit is met");
    };
    println!("rank {}: {error}", rank.rank);
}

#[test]
fn a_limit_on_descriptors_that_cannot_be_raised_is_named_and_no_peer_is_blamed() {
    let printed = play("hard limit", 2, None);
    let named = printed.lines().find(|line| {
        line.contains("no file descriptor left") && line.contains("64") && !line.contains("reports")
    });
    let named = named.unwrap_or_else(|| panic!("{printed}"));
    assert!(!named.contains("peer"), "{named}");
}

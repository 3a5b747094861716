//! What a rank does once a launcher has started it.

use std::process::ExitCode;
use std::time::Duration;

use backend_gloo as _;
use ftcore::{Error, ProcessGroupExt as _, ReduceOp, Result, Tensor, deadline_in};
use oxccl_world::{Place, World, WorldOptions};

use crate::say;

pub(crate) fn play(scene: &str) -> ExitCode {
    match carry_out(scene) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say(&format!("error: {e}"));
            ExitCode::FAILURE
        }
    }
}

fn sum(world: &World) -> Result<f32> {
    let mine = Tensor::from_slice(&[world.rank() as f32 + 1.0]);
    let summed = world.group().all_reduce(mine, ReduceOp::Sum)?.take_tensor()?;
    summed
        .as_slice::<f32>()?
        .first()
        .copied()
        .ok_or_else(|| Error::invalid("no sum"))
}

/// Says what became of a sum that a dead rank is missing from.
fn hear(world: &World, summed: Result<f32>) {
    match summed {
        Ok(_) => say("no rank died"),
        Err(e) => {
            // The group may have heard before the call.
            let e = world.group().error().unwrap_or(e);
            let peer = e.context().peer.map_or("?".to_string(), |p| p.to_string());
            say(&format!(
                "rank {} heard {:?} of rank {peer}",
                world.rank(),
                e.kind()
            ));
        }
    }
}

/// Ends this process as a crash does.
fn die() {
    let me = rustix::process::getpid();
    let _ = rustix::process::kill_process(me, rustix::process::Signal::KILL);
}

/// Where ranks that outlive a lost node look whether the launcher knows of it.
pub(crate) const KNOWN: &str = "OXCCL_TEST_NODE_LOST";

/// Names the file that is there once rank 1 has died.
pub(crate) const DIED: &str = "OXCCL_TEST_DIED";

/// Rank 1 dies in the first attempt, and the others then wait until their launcher ends them. In the second one nothing happens.
fn die_on_one_node(world: &World) -> Result<()> {
    let file = std::env::var(DIED).map_err(|_| Error::invalid(format!("{DIED} is not set")))?;
    let all_said = world.group().barrier();
    if world.rank() == 1 && all_said.is_ok() && std::fs::File::create_new(file).is_ok() {
        die();
    }
    let summed = all_said.and_then(|_| sum(world));
    let is_lost = summed.is_err();
    hear(world, summed);
    if is_lost {
        std::thread::sleep(Duration::from_secs(120));
        return Err(Error::timeout("the launcher left this rank alone"));
    }
    Ok(())
}

/// The rank of the node that is lost says which process it is, and waits for its end.
fn be_lost() -> Result<()> {
    say(&format!("process {}", std::process::id()));
    std::thread::sleep(Duration::from_secs(120));
    Err(Error::timeout("this rank's node was not lost"))
}

/// Until the launcher has taken the node away, and could have ended this rank for it.
fn outlive() -> Result<()> {
    let file = std::env::var(KNOWN).map_err(|_| Error::invalid(format!("{KNOWN} is not set")))?;
    let until = deadline_in(Duration::from_secs(120));
    while !std::path::Path::new(&file).exists() {
        if std::time::Instant::now() > until {
            return Err(Error::timeout("the node was not taken away"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    say("it outlived the node");
    Ok(())
}

/// `reduce`: once. `die`: rank 1 dies once all have done so, and the others say what they hear. `die-once`: likewise, in the first attempt only.
/// `die-on-one-node`: rank 1 dies once all have done so, in the first attempt; the others leave that to its launcher.
/// `lose-node`: the last rank waits until it is killed, and the others say what they hear and whether the launcher lets them be.
fn carry_out(scene: &str) -> Result<()> {
    let place = Place::from_env()?;
    let options = WorldOptions {
        backends: "gloo".parse()?,
        ..WorldOptions::default()
    };
    let world = World::init(&place, options, deadline_in(Duration::from_secs(30)))?;
    let first = sum(&world)?;
    say(&format!(
        "rank {} of {} has {first}",
        world.rank(),
        world.world_size()
    ));
    let restarts = ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"];
    let is_again = restarts
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|count| count != "0"));
    if scene == "die-on-one-node" {
        die_on_one_node(&world)?;
    }
    if scene == "lose-node" && world.rank() + 1 == world.world_size() {
        return be_lost();
    }
    if scene == "lose-node" {
        hear(&world, sum(&world));
        outlive()?;
    }
    if scene == "die" || (scene == "die-once" && !is_again) {
        // Behind it all have said their sums. Those that are still inside when rank 1 dies hear of it there.
        let all_said = world.group().barrier();
        if world.rank() == 1 && all_said.is_ok() {
            die();
        }
        hear(&world, all_said.and_then(|_| sum(&world)));
    }
    world.shutdown(deadline_in(Duration::from_secs(10)))
}

//! INV-10 without a fuzzer: the bodies of `fuzz/` on valid bytes, on those damaged in many ways, and on noise; and mutated
//! greetings on the port of a group that waits for its peers.
//!
//! Everything comes from a seed, so a failure repeats. The ignored trials (`cargo xtask test --long`) run 200 000 cases each;
//! what a fuzzer found worth keeping stands in `fuzz/corpus/TARGET/` and is replayed first.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failure here is a failed test"
)]
#![allow(
    unreachable_pub,
    reason = "the included files are public modules of the fuzzing crate"
)]

// The included sources name these from the crate's root.
use ftcore::{Error, ErrorKind, Result, fields, identity, printable};
#[path = "../../../crates/ftcore/src/coded.rs"]
mod coded;

#[path = "../../../fuzz/src/gloo.rs"]
mod gloo;
#[path = "../../../fuzz/src/isolate.rs"]
mod isolate;
mod listener;
mod mutate;
#[path = "../../../fuzz/src/peers.rs"]
mod peers;
#[path = "../../../fuzz/src/state.rs"]
mod state;
#[path = "../../../fuzz/src/store/mod.rs"]
mod store;
#[path = "../../../fuzz/src/values.rs"]
mod values;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};
use mutate::Mutator;

/// One body, with where its corpus lies and what to begin from.
struct Body {
    target: &'static str,
    run: fn(&[u8]),
    seeds: fn() -> Vec<Vec<u8>>,
}

const BODIES: [Body; 7] = [
    Body {
        target: "gloo_frames",
        run: gloo::frames,
        seeds: gloo::seeds,
    },
    Body {
        target: "store_requests",
        run: store::tcp::requests,
        seeds: store::tcp::seeds,
    },
    Body {
        target: "checkpoint_manifest",
        run: state::manifest,
        seeds: state::manifest_seeds,
    },
    Body {
        target: "checkpoint_state",
        run: state::encoded,
        seeds: state::encoded_seeds,
    },
    Body {
        target: "quant_decode",
        run: values::decode,
        seeds: values::seeds,
    },
    Body {
        target: "isolate_frames",
        run: isolate::frames,
        seeds: isolate::seeds,
    },
    Body {
        target: "peers",
        run: peers::control,
        seeds: peers::seeds,
    },
];

const SHORT: u64 = 4_000;
const LONG: u64 = 200_000;
/// No honest parser needs this for one case of a few KiB.
const SLOW: Duration = Duration::from_secs(5);

/// Runs one case; the error has the bytes, so that the case can be repeated by itself.
fn case(body: &Body, data: &[u8], what: &str) -> std::result::Result<(), Failed> {
    let start = Instant::now();
    let ended = catch_unwind(AssertUnwindSafe(|| (body.run)(data)));
    let hex: String = data.iter().map(|b| format!("{b:02x}")).collect();
    if ended.is_err() {
        return Err(format!("{what} panics; bytes {hex}").into());
    }
    if start.elapsed() > SLOW {
        return Err(format!("{what} takes {:?}; bytes {hex}", start.elapsed()).into());
    }
    Ok(())
}

fn hostile(body: &Body, cases: u64) -> std::result::Result<(), Failed> {
    let mut corpus = (body.seeds)();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/corpus")
        .join(body.target);
    if let Ok(entries) = std::fs::read_dir(folder) {
        let mut files: Vec<_> = entries.flatten().map(|e| e.path()).collect();
        files.sort();
        for file in files {
            corpus.push(std::fs::read(file)?);
        }
    }
    for (i, data) in corpus.iter().enumerate() {
        case(body, data, &format!("entry {i} of the corpus"))?;
    }
    let mut mutator = Mutator::new(0x5EED ^ cases, corpus);
    for n in 0..cases {
        let data = mutator.next();
        case(body, &data, &format!("case {n}"))?;
    }
    Ok(())
}

/// The seeds are what they claim, or the mutations would begin from noise.
fn seeds_are_accepted() -> std::result::Result<(), Failed> {
    let accepted = |parse: &dyn Fn(&[u8]) -> bool, seeds: Vec<Vec<u8>>| seeds.iter().all(|s| parse(s));
    let manifest = |bytes: &[u8]| checkpoint::Manifest::parse(bytes, 1 << 40).is_ok();
    let encoded = |bytes: &[u8]| checkpoint::decode(bytes).is_ok();
    if !accepted(&manifest, state::manifest_seeds()) || !accepted(&encoded, state::encoded_seeds()) {
        return Err("a seed is refused by its own parser".into());
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    // What is caught is told with its bytes; the traces of thousands would only hide it.
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    let mut trials = vec![Trial::test(
        "hostile_bytes::seeds_are_accepted",
        seeds_are_accepted,
    )];
    for body in BODIES.iter() {
        let name = |kind: &str| format!("hostile_bytes::{}::{kind}", body.target);
        trials.push(Trial::test(name("damaged_bytes_do_no_harm"), || {
            hostile(body, SHORT)
        }));
        let long = Trial::test(name("long"), || hostile(body, LONG));
        trials.push(long.with_ignored_flag(true));
    }
    let strangers = "hostile_bytes::gloo_listener";
    trials.push(Trial::test(format!("{strangers}::strangers_do_no_harm"), || {
        listener::survives(100)
    }));
    let long = Trial::test(format!("{strangers}::long"), || listener::survives(5_000));
    trials.push(long.with_ignored_flag(true));
    libtest_mimic::run(&arguments, trials).exit_code()
}

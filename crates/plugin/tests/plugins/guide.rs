//! The walk-through of `docs/plugins.md` is followed to the letter: its blocks are written to files, built and run.

use std::path::{Path, PathBuf};

use ftcore::{Device, ProcessGroupExt, ReduceOp, Tensor};
use libtest_mimic::Trial;
use oxccl_plugin::load;

use crate::ranks::{backend, with_ranks};
use crate::{Outcome, build, ensure, header, text, trial, trial_in_c};

/// The block that follows the line `<!-- file: NAME -->`.
fn block(name: &str) -> Outcome<String> {
    let guide = std::fs::read_to_string(build::root().join("docs/plugins.md")).map_err(text)?;
    let mark = format!("<!-- file: {name} -->\n```");
    let (_, after) = guide
        .split_once(&mark)
        .ok_or_else(|| format!("no block for {name}"))?;
    let (_, after) = after.split_once('\n').ok_or("an open block")?;
    let (text, _) = after.split_once("```").ok_or("an open block")?;
    Ok(text.to_string())
}

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("guide::the_backend_in_rust_is_built_and_reduces", in_rust),
        trial_in_c("guide::the_backend_in_c_is_built_and_reduces", in_c),
    ]
}

/// What both backends of the guide do.
fn reduces(library: &Path, name: &str, world: u32) -> Outcome {
    let backend = backend(&load(library).map_err(text)?, name)?;
    backend.factory.probe().map_err(text)?;
    let sums = with_ranks(&backend, &Device::CPU, world, |rank, group, _| {
        let tensor = Tensor::from_vec(vec![rank as f32 + 1.0, 10.0]);
        let work = group.all_reduce(tensor, ReduceOp::Sum).map_err(text)?;
        let sum = work.take_tensor().map_err(text)?;
        Ok(sum.as_slice::<f32>().map_err(text)?.to_vec())
    })?;
    let n = world as f32;
    let wanted = [n * (n + 1.0) / 2.0, 10.0 * n];
    ensure!(sums.iter().all(|s| *s == wanted), "{sums:?} and not {wanted:?}");
    Ok(())
}

fn in_c() -> Outcome {
    let folder = build::folder("guide")?;
    let source = folder.join("mini.c");
    std::fs::write(&source, block("mini.c")?).map_err(text)?;
    let library = build::c_plugin("mini", &source, &header::folder(), &[])?;
    reduces(&library, "mini", 3)
}

fn in_rust() -> Outcome {
    let folder = build::folder("guide/acme")?;
    let sources = folder.join("src");
    std::fs::create_dir_all(&sources).map_err(text)?;
    let put = |path: PathBuf, words: String| std::fs::write(path, words).map_err(text);
    // The guide names a checkout beside the crate; here it is this one. A workspace of its own, with the versions that
    // this one has locked, so that nothing is fetched.
    let root = std::fs::canonicalize(build::root()).map_err(text)?;
    let manifest = block("Cargo.toml")?.replace("../oxccl", &root.display().to_string());
    put(folder.join("Cargo.toml"), manifest + "\n[workspace]\n")?;
    put(sources.join("lib.rs"), block("src/lib.rs")?)?;
    std::fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).map_err(text)?;
    let library = build::cargo(&folder, &["--offline", "--target-dir", "target"], ".so")?;
    reduces(&library, "acme", 3)
}

//! `cargo +nightly fuzz run seeds`: writes the seeds of every target into `corpus/TARGET/`, so that a fuzzer begins from valid
//! bytes. Not a target itself.

use std::fs;
use std::path::Path;

fn main() -> std::io::Result<()> {
    let seeds = [
        ("gloo_frames", oxccl_fuzz::gloo::seeds()),
        ("store_requests", oxccl_fuzz::store::tcp::seeds()),
        ("checkpoint_manifest", oxccl_fuzz::state::manifest_seeds()),
        ("checkpoint_state", oxccl_fuzz::state::encoded_seeds()),
        ("quant_decode", oxccl_fuzz::values::seeds()),
        ("isolate_frames", oxccl_fuzz::isolate::seeds()),
        ("peers", oxccl_fuzz::peers::seeds()),
    ];
    for (target, seeds) in seeds {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
        fs::create_dir_all(&folder)?;
        for (n, bytes) in seeds.iter().enumerate() {
            fs::write(folder.join(format!("seed-{n:02}")), bytes)?;
        }
    }
    Ok(())
}

//! Compiles `proto/` in pure Rust: no protoc is needed on the machine.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(
        ["proto/torchft.proto", "proto/oxccl.proto", "proto/etcd.proto"],
        ["proto"],
    )?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}

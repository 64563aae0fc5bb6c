//! Compiles the wire contracts, of rings and of lending, to Rust with protox: no protoc needed on the building machine.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        ["ring/v1/ring.proto", "lending/v1/lending.proto"],
        ["proto"],
    )?;
    // Payloads as `Bytes`: the decoder hands out a slice of the receive buffer instead of a copy.
    tonic_prost_build::configure()
        .bytes(".")
        .compile_fds(files)?;
    Ok(())
}

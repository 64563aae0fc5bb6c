//! The test hub as a program of its own, for tests whose clients run in other processes or machines.

use std::error::Error;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use prima_weights::test_hub::TestHub;
use tokio::net::TcpListener;

/// Serves model files as a Hugging Face hub does, counts what it sends, and fails as it is told. For tests only.
#[derive(Parser)]
struct Arguments {
    /// Address of the hub; its control is at /_control and /_counters
    #[arg(long, default_value = "127.0.0.1:8090")]
    listen: SocketAddr,
    /// Address of the CDN that the hub redirects to; clients reach it at the hub's host and this port
    #[arg(long, default_value = "127.0.0.1:8091")]
    cdn_listen: SocketAddr,
    /// The folder with the files, as owner/name/file.gguf
    #[arg(long)]
    dir: PathBuf,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let Arguments {
        listen,
        cdn_listen,
        dir,
    } = Arguments::parse();
    let hub = TestHub::serve(
        &dir,
        TcpListener::bind(listen).await?,
        TcpListener::bind(cdn_listen).await?,
    )?;
    println!("{}", hub.endpoint());
    hub.run().await;
    Ok(())
}

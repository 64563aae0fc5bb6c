//! Rings over several machines without a cluster. A machine's owner lends it (`prima agent`, which is `prima-node-agent lend`), and `prima run`
//! on another machine borrows it (`prima-node-agent borrow`): it asks what the machine can do, measures the links, sends the plan and the part
//! of the model that the member runs, and follows the member until the ring ends.
//!
//! `word` and `door` decide who may borrow: whoever has the word that the agent shows, once, and then whoever has that one's key. `known` is
//! what is remembered of that. `lend` and `guest` are the lender's side, `borrow`, `remote` and `send` the borrower's; `proto` is what they say.
//!
//! Refuses: to let a borrower choose what is run (it is this program's `serve`), where its model lies, or how much of the memory weights may
//! take: that is for the machine's owner. Otherwise a borrower is trusted: its plan says how long contexts may be, and it has this machine
//! connect to the others.

pub mod borrow;
mod door;
mod guest;
mod known;
pub mod lend;
mod proto;
mod remote;
mod send;
mod word;

/// Bytes of a model's file in one message. What is on the way delays the pings by which a lost machine is noticed, and must not do so for
/// seconds on a slow link.
const CONTENT_BYTES: usize = 128 << 10;
/// The largest message: the plan of a large ring.
const MAX_MESSAGE_BYTES: usize = 4 << 20;

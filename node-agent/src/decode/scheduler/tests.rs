//! What the scheduler makes of requests, on a simulated ring (`world`): a file for each subject.

mod chunks;
mod competing_requests;
mod drafts;
mod faults;
mod frames_ahead;
mod kept_prefixes;
mod random_mixes;
mod vectors;
mod world;

use super::*;
use world::*;

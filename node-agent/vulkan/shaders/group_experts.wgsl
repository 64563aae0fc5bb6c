// Gathers the choices of all rows by expert, and cuts the rows of each expert into tiles. One group does it all.

const THREADS = 256u;
const MOST_EXPERTS = 512u;

struct Params {
    // Rows times the experts that each uses.
    choices: u32,
    used: u32,
    experts: u32,
    // Rows of a tile, and how many tiles there may be.
    height: u32,
    tiles: u32,
}

var<immediate> params: Params;

@group(0) @binding(0) var<storage, read> choices: array<vec2u>;
// Which row of the pass each gathered row is.
@group(0) @binding(1) var<storage, read_write> rows: array<u32>;
// Of each choice, its gathered row.
@group(0) @binding(2) var<storage, read_write> places: array<u32>;
// As `expert_rows.wgsl` reads them.
@group(0) @binding(3) var<storage, read_write> tiles: array<vec4u>;

// Of each expert: its choices, the gathered rows before them, and those that are taken.
var<workgroup> counts: array<atomic<u32>, MOST_EXPERTS>;
var<workgroup> taken: array<atomic<u32>, MOST_EXPERTS>;
var<workgroup> firsts: array<u32, MOST_EXPERTS>;
var<workgroup> tiles_in_all: u32;

@compute @workgroup_size(THREADS)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        atomicStore(&counts[expert], 0u);
        atomicStore(&taken[expert], 0u);
    }
    workgroupBarrier();
    for (var i = thread; i < params.choices; i += THREADS) {
        atomicAdd(&counts[choices[i].x], 1u);
    }
    workgroupBarrier();
    for (var expert = thread; expert < params.experts; expert += THREADS) {
        var first = 0u;
        var tile = 0u;
        for (var before = 0u; before < expert; before++) {
            let count = atomicLoad(&counts[before]);
            first += count;
            tile += tiles_of(count);
        }
        firsts[expert] = first;
        let count = atomicLoad(&counts[expert]);
        for (var i = 0u; i < tiles_of(count); i++) {
            let start = i * params.height;
            tiles[tile + i] = vec4u(expert, first + start, first + min(start + params.height, count), 0u);
        }
        if expert == params.experts - 1u {
            tiles_in_all = tile + tiles_of(count);
        }
    }
    workgroupBarrier();
    // Groups that get one of the others are idle.
    for (var i = tiles_in_all + thread; i < params.tiles; i += THREADS) {
        tiles[i] = vec4u();
    }
    // In which order an expert's rows lie changes no number: each is a product of its own.
    for (var i = thread; i < params.choices; i += THREADS) {
        let expert = choices[i].x;
        let place = firsts[expert] + atomicAdd(&taken[expert], 1u);
        rows[place] = i / params.used;
        places[i] = place;
    }
}

fn tiles_of(count: u32) -> u32 {
    return (count + params.height - 1u) / params.height;
}

/* Memory of graphs, however their nodes came into them. */
#include "both.h"

struct alloc { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; void *access; size_t count, bytes; uint64_t at; };
struct node { int kind, zero[3]; union { struct alloc alloc; uint64_t pointer; void *child; uint64_t room[29]; }; uint64_t last; };

static struct alloc of(size_t bytes) {
    struct alloc alloc = {1, 0, 1, 0, 0, {0}, 0, 0, bytes, 0};
    return alloc;
}

int main(int count, char **arguments) {
    void *graph, *child, *run, *other, *node, *none = 0, *stream;
    uint64_t p, q, upload[4] = {2, 0, 0, 0};
    struct alloc alloc = of(40 * MIB);
    size_t no = 0;
    open_both(arguments);
    begin();
    ok(CU(cuStreamCreate, &stream, 1), "stream");
    /* Taken and freed in the graph. */
    ok(CU(cuGraphCreate, &graph, 0), "graph");
    STEP(CU(cuGraphAddMemAllocNode, &node, graph, none, no, &alloc));
    ok(CU(cuGraphAddMemFreeNode, &node, graph, none, no, alloc.at), "free node");
    STEP(CU(cuGraphInstantiateWithFlags, &run, graph, 0ull));
    STEP(CU(cuGraphLaunch, run, stream));
    STEP(CU(cuGraphLaunch, run, stream));
    STEP(CU(cuStreamSynchronize, stream));
    STEP(CU(cuDeviceGraphMemTrim, 0));
    STEP(CU(cuGraphLaunch_ptsz, run, stream));
    STEP(CU(cuGraphExecDestroy, run));
    STEP(CU(cuDeviceGraphMemTrim, 0));
    /* Taken in the graph, freed outside; as nodes of any kind. */
    struct node any = {10, {0}, {.alloc = of(30 * MIB)}, 0};
    ok(CU(cuGraphCreate, &graph, 0), "graph");
    STEP(CU(cuGraphAddNode, &node, graph, none, no, &any));
    p = any.alloc.at;
    struct node more = {10, {0}, {.alloc = of(5 * MIB)}, 0};
    STEP(CU(cuGraphAddNode_v2, &node, graph, none, none, no, &more));
    STEP(CU(cuGraphInstantiate_v2, &run, graph, none, none, no));
    STEP(CU(cuGraphUpload, run, stream));
    STEP(CU(cuGraphLaunch, run, stream));
    STEP(CU(cuDeviceGraphMemTrim, 0));
    STEP(CU(cuMemFreeAsync, p, stream));
    STEP(CU(cuMemFree_v2, more.alloc.at));
    STEP(CU(cuGraphExecUpdate_v2, run, graph, none));
    STEP(CU(cuDeviceGraphMemTrim, 0));
    STEP(CU(cuGraphExecDestroy, run));
    /* A graph in a graph. */
    ok(CU(cuGraphCreate, &child, 0), "child");
    alloc = of(20 * MIB);
    ok(CU(cuGraphAddMemAllocNode, &node, child, none, no, &alloc), "node");
    ok(CU(cuGraphAddMemFreeNode, &node, child, none, no, alloc.at), "free node");
    ok(CU(cuGraphCreate, &graph, 0), "graph");
    STEP(CU(cuGraphAddChildGraphNode, &node, graph, none, no, child));
    STEP(CU(cuGraphInstantiateWithParams, &run, graph, upload));
    STEP(CU(cuGraphUpload_ptsz, run, stream));
    STEP(CU(cuGraphExecDestroy, run));
    STEP(CU(cuDeviceGraphMemTrim, 0));
    /* Captured: nothing is taken until the graph runs. */
    ok(CU(cuStreamBeginCapture_v2, stream, 2), "capture");
    STEP(CU(cuMemAllocAsync, &p, 50 * MIB, stream));
    STEP(CU(cuMemFreeAsync, p, stream));
    STEP(CU(cuMemAllocAsync, &q, 10 * MIB, stream));
    STEP(CU(cuStreamEndCapture, stream, &graph));
    STEP(CU(cuGraphInstantiateWithFlags, &run, graph, 0ull));
    STEP(CU(cuGraphLaunch, run, stream));
    STEP(CU(cuMemFreeAsync, q, stream));
    STEP(CU(cuStreamSynchronize, stream));
    /* What is not granted does not run; what nobody uses makes room. */
    ok(CU(cuGraphCreate, &graph, 0), "graph");
    alloc = of(400 * MIB);
    ok(CU(cuGraphAddMemAllocNode, &node, graph, none, no, &alloc), "node");
    say("{\"refused\":%d}", CU(cuGraphInstantiateWithFlags, &other, graph, 2ull));
    STEP(CU(cuGraphInstantiateWithFlags, &other, graph, 0ull));
    say("{\"refused\":%d}", CU(cuGraphUpload, other, stream));
    say("{\"refused\":%d}", CU(cuGraphLaunch, other, stream));
    STEP(CU(cuGraphExecDestroy, other));
    STEP(CU(cuMemAlloc_v2, &p, 250 * MIB));
    say("{\"refused\":%d}", CU(cuGraphLaunch, run, stream));
    STEP(CU(cuMemFree_v2, p));
    STEP(CU(cuGraphLaunch, run, stream));
    STEP(CU(cuGraphExecDestroy, run));
    STEP(CU(cuMemFreeAsync, q, stream));
    STEP(CU(cuDeviceGraphMemTrim, 0));
    (void)count;
    return 0;
}

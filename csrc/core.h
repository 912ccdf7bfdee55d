/* The interface of the C core, and at the same time the cffi cdef: build_core.py drops the lines that start with '#'.
 *
 * Plain C11 without mpi.h or Python.h. Addresses travel as uintptr_t, so that Python passes plain ints. Every function
 * that can fail returns a code of enum pr_code; pyreduce/ops.py turns codes into exceptions.
 */
#ifndef PYREDUCE_CORE_H
#define PYREDUCE_CORE_H
#include <stddef.h>
#include <stdint.h>

/* The one table of codes: 0 is success, what is negative an error; what is positive says how far a call has come. */
enum pr_code {
    PR_OK = 0,
    PR_PENDING = 1,  /* a peer has not come yet */
    PR_MISMATCH = 2, /* a peer has come with another call, or has given up */
    PR_SHUT = 3,     /* not this way: nothing was done */
    PR_BUSY = 4,     /* another call is under way */
    PR_BAD_OP = -1,      /* no such op */
    PR_BAD_DTYPE = -2,   /* no such dtype */
    PR_BAD_PAIR = -3,    /* the op is not defined for the dtype */
    PR_BAD_COUNT = -4,   /* k < 1 */
    PR_BAD_DIVISOR = -5, /* not positive, or not exact in float32 */
    PR_NO_ROOM = -7,     /* out of memory, or slots too small for so many ranks */
    PR_MPI_FAILED = -8,  /* a function of the MPI: pr_run_error says how */
    PR_NO_MPI = -9,      /* not an MPI whose handles and statuses we know how to keep */
    PR_BAD_ISA = -6      /* PYREDUCE_ISA names an instruction set that is unknown or not available here */
};

enum pr_op { PR_SUM, PR_PROD, PR_MIN, PR_MAX, PR_LAND, PR_LOR, PR_LXOR, PR_BAND, PR_BOR, PR_BXOR, PR_OP_COUNT };

enum pr_dtype {
    PR_BOOL,
    PR_INT8,
    PR_INT16,
    PR_INT32,
    PR_INT64,
    PR_UINT8,
    PR_UINT16,
    PR_UINT32,
    PR_UINT64,
    PR_FLOAT16,
    PR_BFLOAT16,
    PR_FLOAT32,
    PR_FLOAT64,
    PR_LONGDOUBLE,
    PR_COMPLEX64,
    PR_COMPLEX128,
    PR_DTYPE_COUNT
};

/* out[i] = ((s0[i] op s1[i]) op s2[i]) ... for i < n, in one pass over memory, for any k >= 1. out may be exactly one
 * of the sources, any of them; other overlaps are not allowed. Any alignment. Integers wrap; MIN and MAX propagate the
 * first NaN; logical ops give 0 or 1; k = 1 is a copy; float16 and bfloat16 are folded in float32 and rounded once, to
 * nearest even. All instruction sets give the same bits, but for which NaN a SUM or PROD
 * of several different NaNs becomes. */
int pr_fold(int op, int dtype, size_t n, uintptr_t out, const uintptr_t *srcs, int k);

/* pr_fold of two sources: saves Python a list, a third of the cost of a call. */
int pr_fold2(int op, int dtype, size_t n, uintptr_t out, uintptr_t first, uintptr_t second);

/* Copy bytes; they may overlap. */
void pr_copy(size_t nbytes, uintptr_t out, uintptr_t src);

/* out[i] = src[i] / divisor, rounded once (float16 and bfloat16 through float32, complex by component). out may be src.
 * divisor is a number of ranks: positive and exact in float32. */
int pr_divide(int dtype, size_t n, uintptr_t out, uintptr_t src, double divisor);

/* The instruction set in use, "baseline", "avx2" or "avx512"; NULL if PYREDUCE_ISA asks for one that is not there.
 * The environment is read once, by whichever call comes first. */
const char *pr_isa(void);

/* Signal cells: aligned 64-bit counters in memory that processes share. To add to one, or to set it, is a release; if
 * record is not 0, the count there, which belongs to the caller, goes up by one first. */
void pr_cell_add(uintptr_t cell, int64_t value, uintptr_t record);
void pr_cell_set(uintptr_t cell, int64_t value, uintptr_t record);

/* The value, as an acquire. */
int64_t pr_cell_read(uintptr_t cell);

/* Replace expected by desired; returns what was there, which is expected if it succeeded. */
int64_t pr_cell_compare_and_swap(uintptr_t cell, int64_t expected, int64_t desired);

/* Look up to so many times (one at least) whether the cell is at least, or exactly, expected: 1 if so, then as an acquire, else 0. */
int pr_cell_look(uintptr_t cell, int64_t expected, int times);
int pr_cell_look_equal(uintptr_t cell, int64_t expected, int times);

/* The same for some time, yielding the core after so many looks. */
int pr_cell_wait(uintptr_t cell, int64_t expected, int equal, int times, int64_t nanoseconds);

/* Copy bytes past the caches, where the CPU can; the regions are apart. */
void pr_copy_streaming(size_t nbytes, uintptr_t out, uintptr_t src);

/* The shared-memory engine (csrc/shared_engine.c). One rank's engine works on the parts of an arena, all zero at first,
 * of pr_shared_bytes(slot) bytes each and aligned to 128; parts[r] is where rank r's lies in this process. */
enum pr_collective { PR_REDUCE_SCATTER, PR_ALLGATHER, PR_ALLREDUCE };

struct pr_shared;      /* an engine */
struct pr_shared_plan; /* a collective for given sizes */
struct pr_door;        /* a short way in from NumPy arrays */

size_t pr_shared_bytes(size_t slot);

/* looks: how often a waiting loop looks before it yields the core. cache: bytes of the last-level cache; results that
 * would not stay in it are stored past it. NULL: no memory. */
struct pr_shared *pr_shared_open(int nranks, int rank, const uintptr_t *parts, size_t slot, int looks,
                                 size_t cache);
void pr_shared_close(struct pr_shared *e);

/* Memory besides the arena that all ranks can read: inputs that lie there are read in place. The same on all ranks. */
int pr_shared_add_chunk(struct pr_shared *e, const uintptr_t *parts, size_t nbytes);
void pr_shared_forget_chunks(struct pr_shared *e);

/* Prepare a collective: op and dtype of a fold (of none for an allgather), a divisor or 0, the bytes of an element, the
 * elements of every rank's block, a number that is the same on all ranks if they make the same call. An allreduce of up
 * to small_bytes runs in one phase. NULL: code says why. */
struct pr_shared_plan *pr_shared_plan(struct pr_shared *e, int collective, int op, int dtype, double divisor,
                                      size_t size, const size_t *counts, uint64_t fingerprint, size_t small_bytes,
                                      int *code);
void pr_shared_plan_free(struct pr_shared_plan *p);
uint64_t pr_shared_plan_calls(const struct pr_shared_plan *p);
uint64_t pr_shared_plan_pieces(const struct pr_shared_plan *p);
uint64_t pr_shared_plan_waited(const struct pr_shared_plan *p); /* nanoseconds */

/* Begin a call and do what can be done at once. target may be source (an allgather's: be around it); in place, a
 * reduce_scatter needs counts[0] >= counts[rank], or its result would lie over what is still to be read. One call at a time: PR_BUSY if another is under way. PR_OK: it is over. */
int pr_shared_start(struct pr_shared_plan *p, uintptr_t source, uintptr_t target);

/* The same, but only publish the first piece: for calls that somebody else goes on with. PR_PENDING. */
int pr_shared_begin(struct pr_shared_plan *p, uintptr_t source, uintptr_t target);

/* Go on with it: do what can be done, and wait for peers for about so long; 0: not at all. */
int pr_shared_advance(struct pr_shared *e, int64_t nanoseconds);

/* Which ranks are waited for: missing[r] is 0 or 1; their number. The round, counted by pieces from 1. */
int pr_shared_missing(const struct pr_shared *e, unsigned char *missing);
uint64_t pr_shared_rounds(const struct pr_shared *e);

/* The plan of the call under way, or NULL. */
struct pr_shared_plan *pr_shared_current(const struct pr_shared *e);

/* This rank has given up: whoever comes later finds a mismatch. */
void pr_shared_poison(struct pr_shared *e);

/* Doors (csrc/shared_door.c): a door may be NULL, which is shut; objects are CPython's ndarrays, by address. pr_door_layout says how many bytes the head of
 * an object has, and where the type ndarray lies; pr_door_look, what is seen of an array, so that it can be compared. */
void pr_door_layout(size_t head, uintptr_t type);
int pr_door_look(uintptr_t object, uintptr_t *data, int *nd, intptr_t *first_dim, uintptr_t *descr, int *flags);
uintptr_t pr_door_address(uintptr_t object); /* of an array's data; 0: not known */
struct pr_door *pr_door_make(struct pr_shared *e);
void pr_door_free(struct pr_door *door);

/* Have a door know a plan for arrays like these; PR_SHUT if it does already, or if they are not for doors. */
int pr_door_add(struct pr_door *door, struct pr_shared_plan *plan, uintptr_t send, uintptr_t recv);

/* A whole call; with one array for both, in place. PR_SHUT: nothing was done, take the long way. PR_PENDING, PR_MISMATCH: go on with pr_shared_advance. */
int pr_door_call(struct pr_door *door, uintptr_t send, uintptr_t recv);

/* Whether pr_door_call has left a call waiting, which only the thread that made it may go on with; and that it has. */
int pr_door_waiting(const struct pr_shared *e);
void pr_door_taken_over(struct pr_shared *e);

/* The two halves of a call, for addresses that are known to be good. */
int pr_door_start(struct pr_shared_plan *p, uintptr_t source, uintptr_t target);
int pr_door_wait(struct pr_shared_plan *p);

/* Calls that have come through doors. */
uint64_t pr_door_calls(const struct pr_shared *e);

/* Shut all doors of an engine, for the long way; PR_BUSY if another thread is inside one. */
int pr_door_shut(struct pr_shared *e);
void pr_door_open(struct pr_shared *e);

/* Programs of messages (csrc/rounds.c), over the MPI that Python has loaded: pr_mpi_use takes its functions, in this
 * order, its MPI_BYTE, and the bytes of a handle and of a status. */
enum pr_mpi_function {
    PR_MPI_ISEND,
    PR_MPI_IRECV,
    PR_MPI_SEND_INIT,
    PR_MPI_RECV_INIT,
    PR_MPI_STARTALL,
    PR_MPI_TESTALL,
    PR_MPI_REQUEST_FREE,
    PR_MPI_TYPE_CREATE_HINDEXED,
    PR_MPI_TYPE_COMMIT,
    PR_MPI_TYPE_FREE,
    PR_MPI_FUNCTIONS
};

int pr_mpi_use(const uintptr_t *functions, uintptr_t byte, size_t handle_bytes, size_t status_bytes);

struct pr_run; /* a program for the sizes of a call, under way or to be started again */

enum pr_work { PR_WORK_FOLD, PR_WORK_COPY, PR_WORK_DIVIDE };

/* words: the program, as rounds.c says, which must outlive it; op, dtype, element, divisor: of its folds, if it has any;
 * kept: it is always started with the same arguments, and its messages are prepared once. NULL: no memory. */
struct pr_run *pr_run_new(const int64_t *words, int op, int dtype, size_t element, double divisor, int kept);

/* Begin, and do what can be done at once; the last one must be over. Then go on, and wait for peers for about so long,
 * 0: not at all, until so many rounds are over; what can be done without waiting is done in any case. The number of
 * rounds that are over, or a code: then it cannot be gone on with. */
int pr_run_start(struct pr_run *run, uintptr_t comm, int tag, uintptr_t input, uintptr_t output, uintptr_t scratch);
int pr_run_advance(struct pr_run *run, int64_t nanoseconds, int until);

/* When it began, and when each round was over, by pr_clock: nanoseconds. */
const int64_t *pr_run_times(const struct pr_run *run);
int64_t pr_clock(void);

/* The MPI's code, after PR_MPI_FAILED. */
int pr_run_error(const struct pr_run *run);

/* Have the MPI free the messages it has prepared. */
int pr_run_give_back(struct pr_run *run);

/* The memory, unless messages are under way, which the MPI writes to. */
void pr_run_free(struct pr_run *run);

#endif
